package healthd

import (
	"errors"
	"net"
	"net/http"
	"net/netip"
	"os"
	"runtime"
	"strings"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/steelyard-lb/steelyard/lb"
	"github.com/steelyard-lb/steelyard/lb/lbtest/must"
)

// listenAs returns a listener of a user.
func listenAs(t *testing.T, uid int, address string) net.Listener {
	t.Helper()
	var l net.Listener
	var err error
	done := make(chan struct{})
	go func() {
		defer close(done)
		runtime.LockOSThread() // and the thread ends with this goroutine: only it has the user
		if _, _, no := syscall.RawSyscall(unix.SYS_SETRESUID, ^uintptr(0), uintptr(uid), ^uintptr(0)); no != 0 {
			err = no
			return
		}
		l, err = net.Listen("tcp", address)
	}()
	<-done
	must.Do(t, err)
	t.Cleanup(func() { l.Close() })
	return l
}

// A check that believes only root takes the answer of another user for none: every user can listen at the port of
// kube-proxy's health endpoint. Who answers where no socket is found is believed.
func TestAnswersOfRootOnly(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("needs root: sockets have owners")
	}
	for _, tt := range []struct {
		uid             int
		listens, target string
		refused         bool
	}{
		{0, "127.0.0.1:0", "127.0.0.1", false}, {65534, "127.0.0.1:0", "127.0.0.1", true},
		{65534, "0.0.0.0:0", "127.0.0.1", true}, {65534, "[::]:0", "127.0.0.1", true},
		{0, "[::]:0", "127.0.0.1", false}, {65534, "[::1]:0", "::1", true},
		{0, "[::1]:0", "::1", false}, {65534, "[::]:0", "::1", true},
	} {
		l := listenAs(t, tt.uid, tt.listens)
		s := &http.Server{Handler: http.HandlerFunc(func(http.ResponseWriter, *http.Request) {})}
		go s.Serve(l)
		to := netip.AddrPortFrom(netip.MustParseAddr(tt.target), targetOf(l.Addr()).Port())
		c := lb.Check{ByRoot: true, Target: to, Spec: lb.CheckSpec{Type: lb.CheckHTTP, Path: "/"}}
		got := probeFor(t, c, "")
		_, err := newHTTPChecker(target{Check: c}).Probe(t.Context())
		if strings.Contains(got, "user 65534") != tt.refused || errors.Is(err, syscall.ECONNREFUSED) != tt.refused {
			t.Errorf("user %d at %s, probed at %s: %s", tt.uid, tt.listens, tt.target, got)
		}
		c.ByRoot = false
		if got := probeFor(t, c, ""); got != "ok: HTTP 200" {
			t.Errorf("a check that believes everybody: %s", got)
		}
		s.Close()
	}
	closed := closedPort(t)
	if err := byRoot(closed); err != nil {
		t.Errorf("nobody listens: %v", err)
	}
}
