package demo_test

import (
	"bytes"
	"context"
	"fmt"
	"os"
	"os/signal"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/steelyard-lb/steelyard/e2e/lab/labtest"
	"github.com/steelyard-lb/steelyard/lb/agent"
	"github.com/steelyard-lb/steelyard/lb/cli"
	"github.com/steelyard-lb/steelyard/lb/demo"
	"github.com/steelyard-lb/steelyard/lb/lbtest/must"
)

// TestMain makes the test program every program that the demo starts: with arguments it is steelyard, and with options
// in its environment a speaker for the test of the router.
func TestMain(m *testing.M) {
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM)
	defer stop()
	switch text := os.Getenv(demo.SpeakerOptions); {
	case text != "":
		if err := demo.Speak(ctx, text); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
	case len(os.Args) > 1 && (os.Args[1] == "run" || os.Args[1] == "demo-router"):
		programs := cli.Programs{Run: agent.Main, DemoRouter: demo.Router}
		os.Exit(cli.Main(ctx, os.Args[1:], os.Stdout, os.Stderr, programs))
	default:
		os.Exit(m.Run())
	}
}

// TestDemo runs the whole demo, as make demo does.
func TestDemo(t *testing.T) {
	labtest.Root(t)
	self := must.Get(os.Executable())(t)
	var out bytes.Buffer
	err := demo.Run(t.Context(), &out, self, demo.Options{})
	t.Logf("\n%s", &out)
	must.Do(t, err)
	must.True(t, !strings.Contains(out.String(), "\x1b"), "want no escape sequences without a terminal")
	must.Equal(t, nil, children(t))
}

// TestDemoInterrupted checks that Ctrl-C in the middle of a step ends the demo soon, with an error, and leaves nothing.
func TestDemoInterrupted(t *testing.T) {
	labtest.Root(t)
	self := must.Get(os.Executable())(t)
	ctx, cancel := context.WithCancel(t.Context())
	out := &until{text: "A server fails", then: cancel}
	err := demo.Run(ctx, out, self, demo.Options{})
	must.True(t, err != nil && strings.Contains(err.Error(), "interrupted"),
		"want an error that says interrupted, got %v after\n%s", err, &out.Buffer)
	took := time.Since(out.at)
	must.True(t, took <= 5*time.Second, "want the end within 5 s, it took %v", took)
	must.Equal(t, nil, children(t))
}

// until is a writer that calls then once text has been written to it.
type until struct {
	bytes.Buffer
	text string
	then func()
	at   time.Time
}

func (u *until) Write(b []byte) (int, error) {
	if u.at.IsZero() && bytes.Contains(b, []byte(u.text)) {
		u.at = time.Now()
		u.then()
	}
	return u.Buffer.Write(b)
}

// children returns the child processes of this one.
func children(t *testing.T) []string {
	t.Helper()
	stats := must.Get(filepath.Glob("/proc/[0-9]*/stat"))(t)
	self := strconv.Itoa(os.Getpid())
	var all []string
	for _, stat := range stats {
		b, _ := os.ReadFile(stat) // it may have ended in between
		if _, rest, ok := strings.Cut(string(b), ") "); ok && strings.Fields(rest)[1] == self {
			all = append(all, string(b))
		}
	}
	return all
}
