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
)

// fullEnv names the socket of the process of TestStatusWithoutDescriptors that has no descriptors left.
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
	in, err := cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	lines := bufio.NewReader(out)
	line, err := lines.ReadString('\n')
	if err != nil || line != "full\n" {
		t.Errorf("%q, %v; want full", line, err)
	}
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
	if err := unix.Getrlimit(unix.RLIMIT_NOFILE, &limit); err != nil {
		t.Fatal(err)
	}
	limit.Cur = 64
	if err := unix.Setrlimit(unix.RLIMIT_NOFILE, &limit); err != nil {
		t.Fatal(err)
	}
	var taken []*os.File
	for {
		f, err := os.Open(os.DevNull)
		if errors.Is(err, syscall.EMFILE) {
			break
		}
		if err != nil {
			t.Fatal(err)
		}
		taken = append(taken, f)
	}
	fmt.Println("full")
	if _, err := io.Copy(io.Discard, os.Stdin); err != nil {
		t.Fatal(err)
	}
	for _, f := range taken {
		f.Close()
	}
}
