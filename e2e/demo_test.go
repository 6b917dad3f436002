package e2e

import (
	"bufio"
	"bytes"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/steelyard-lb/steelyard/e2e/lab"
	"github.com/steelyard-lb/steelyard/e2e/lab/labtest"
	"github.com/steelyard-lb/steelyard/lb/lbtest/must"
)

// TestDemoShell checks that commands work in the demo's shell, that clients fail in an incident as it says and a
// command names the cause, and that no process remains when the shell ends, or when the demo is killed.
func TestDemoShell(t *testing.T) {
	t.Parallel()
	labtest.Root(t)
	const request = "client1 curl -sS -m 3 "
	for _, tt := range []struct {
		name, arg string
		script    []string
		want      []string // regular expressions
	}{
		{
			"no incident", "--shell",
			[]string{
				request + "http://203.0.113.10/", "lb2 steelyard status", "lb1 router ip route",
				"lb1 steelyard check", "client1 sh -c 'sleep 1000 & exec sleep 1000' &",
			},
			[]string{`(?m)^s[123]$`, `(?m)^node +lb2$`, `nexthop via 192\.0\.2\.130`, `ok: .*: 1 service`},
		}, {
			"a dead port", "--break=port-dead",
			[]string{
				request + "http://203.0.113.10/", request + "http://203.0.113.10:7/",
				"while ! lb1 steelyard status | grep 203.0.113.10:7/tcp; do sleep 0.2; done",
			},
			[]string{
				`clients of port 7 are refused`, `(?m)^s[123]$`, `curl: \(7\)`,
				`203\.0\.113\.10:7/tcp of web: none of`, `The incident was port-dead: no server listens on port 7`,
			},
		}, {
			"a route filter", "--break=route-filter",
			[]string{
				request + "http://203.0.113.10/", request + "'http://[2001:db8:1::10]/'",
				"while ! lb1 steelyard doctor | grep 203.0.113.10; do sleep 1; done",
			},
			[]string{
				`203\.0\.113\.10 does not answer; 2001:db8:1::10 works`, `curl: \((7|28)\)`, `(?m)^s[123]$`,
				`192\.0\.2\.129 .*203\.0\.113\.10`,
			},
		},
	} {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			demo, mark := demoShell(t, tt.arg)
			demo.Stdin = strings.NewReader(strings.Join(tt.script, "\n"))
			var out bytes.Buffer
			demo.Stdout, demo.Stderr = &out, &out
			must.True(t, demo.Run() == nil, "%s", &out)
			for _, want := range tt.want {
				must.True(t, regexp.MustCompile(want).Match(out.Bytes()), "no %s in\n%s", want, &out)
			}
			must.Equal(t, nil, marked(mark))
		})
	}
	for name, signal := range map[string]os.Signal{"killed": os.Kill, "interrupted": os.Interrupt} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			demo, mark := demoShell(t, "--shell")
			demo.Stdin = strings.NewReader("client1 sleep 1000 &\necho started\nsleep 1000\n")
			out := must.Get(demo.StdoutPipe())(t)
			must.Do(t, demo.Start())
			for lines := bufio.NewScanner(out); lines.Scan() && lines.Text() != "started"; {
			}
			must.Need(t, len(marked(mark)) > 6, "this process sees no process of the demo")
			must.Do(t, demo.Process.Signal(signal))
			labtest.Within(t, 5*time.Second*lab.TimeFactor, "no process remains", func() error {
				left := marked(mark)
				return labtest.ErrorIf(len(left) > 0, "%s", left)
			})
			must.True(t, demo.Wait() != nil, "the demo reports success")
		})
	}
}

// demoShell returns the command for a demo, and what marks its processes.
func demoShell(t *testing.T, arg string) (demo *exec.Cmd, mark string) {
	mark = fmt.Sprintf("STEELYARD_TEST=%s of process %d", t.Name(), os.Getpid())
	demo = exec.CommandContext(t.Context(), binary, "demo", arg)
	demo.Env = append(os.Environ(), "SHELL=sh", mark)
	return demo, mark
}

// marked returns the command lines of processes that have this in their environment.
func marked(mark string) (all []string) {
	paths, _ := filepath.Glob("/proc/[0-9]*/environ")
	for _, path := range paths {
		environ, _ := os.ReadFile(path) // it may have ended
		if strings.Contains("\x00"+string(environ), "\x00"+mark+"\x00") {
			line, _ := os.ReadFile(filepath.Dir(path) + "/cmdline")
			all = append(all, strings.ReplaceAll(string(line), "\x00", " "))
		}
	}
	return all
}
