package admin

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/steelyard-lb/steelyard/lb/lbtest/must"
)

// fullEnv names the socket of the process in TestStatusWithoutDescriptors that has no descriptors left.
const fullEnv = "STEELYARD_TEST_FULL"

// An agent without descriptors answers by its socket, one client after the other.
func TestStatusWithoutDescriptors(t *testing.T) {
	if socket := os.Getenv(fullEnv); socket != "" {
		serveWithoutDescriptors(t, socket)
		return
	}
	socket := options(t).Socket
	cmd := exec.Command(os.Args[0], "-test.run=^TestStatusWithoutDescriptors$")
	cmd.Env, cmd.Stderr = append(os.Environ(), fullEnv+"="+socket), os.Stderr
	in := must.Get(cmd.StdinPipe())(t)
	out := must.Get(cmd.StdoutPipe())(t)
	must.Do(t, cmd.Start())
	lines := bufio.NewReader(out)
	line, err := lines.ReadString('\n')
	must.True(t, err == nil && line == "full\n", "%q, %v; want full", line, err)
	c := NewClient(socket)
	for n := range 3 {
		var i Info
		if err := c.Get(t.Context(), "/v1/status", &i); err != nil || i.Verdict == "" {
			t.Errorf("request %d: %v, %+v", n, err, i)
		}
	}
	in.Close()
	rest, _ := io.ReadAll(lines)
	if err := cmd.Wait(); err != nil {
		t.Errorf("%v\n%s", err, rest)
	}
}

// serveWithoutDescriptors takes all descriptors while the API is served, until stdin ends.
func serveWithoutDescriptors(t *testing.T, socket string) {
	o := options(t)
	o.Socket = socket
	open := make(chan bool, 2)
	o.Problem = func(_ string, err error) { open <- err == nil }
	server := New(o)
	go server.Run(t.Context())
	if !<-open {
		t.Fatal("the socket is not open")
	}
	var limit unix.Rlimit
	must.Do(t, unix.Getrlimit(unix.RLIMIT_NOFILE, &limit))
	limit.Cur = 64
	must.Do(t, unix.Setrlimit(unix.RLIMIT_NOFILE, &limit))
	var taken []*os.File
	for {
		f, err := os.Open(os.DevNull)
		if errors.Is(err, syscall.EMFILE) {
			break
		}
		must.Do(t, err)
		taken = append(taken, f)
	}
	fmt.Println("full")
	must.Get(io.Copy(io.Discard, os.Stdin))(t)
	for _, f := range taken {
		f.Close()
	}
}
