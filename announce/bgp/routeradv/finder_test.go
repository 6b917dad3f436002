package routeradv

import (
	"log/slog"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"
)

// A router that is heard is not replaced by another one on the link, until it has been silent.
func TestRouterIsKept(t *testing.T) {
	first, second := netip.MustParseAddr("fe80::1%eth0"), netip.MustParseAddr("fe80::2%eth0")
	var found []netip.Addr
	o := Options{
		Found: func(_ string, a netip.Addr) { found = append(found, a) }, Log: slog.New(slog.DiscardHandler),
	}
	l := &link{name: "eth0", o: &o}
	for _, from := range []netip.Addr{first, second, first} {
		l.hear(from)
	}
	l.heard = time.Now().Add(-silence - time.Second)
	o.InUse = func(netip.Addr) bool { return true }
	if l.hear(second) {
		t.Error("a router with a session was replaced")
	}
	o.InUse = func(netip.Addr) bool { return false }
	if !l.hear(second) || l.hear(second) {
		t.Error("a router is new when it is heard first, and only then")
	}
	if want := []netip.Addr{first, second}; !slices.Equal(found, want) {
		t.Errorf("found %v, want %v", found, want)
	}
}

// An interface that does not exist is a reason, and is tried again.
func TestMissingInterface(t *testing.T) {
	f := New(Options{Log: slog.New(slog.DiscardHandler)})
	done := make(chan struct{})
	f.SetInterfaces([]string{"none0"})
	go func() {
		f.Run(t.Context())
		close(done)
	}()
	t.Cleanup(func() { <-done })
	for end := time.Now().Add(10 * time.Second); ; time.Sleep(time.Millisecond) {
		if strings.HasPrefix(f.Problem("none0"), "interface none0: ") {
			return
		}
		if time.Now().After(end) {
			t.Fatalf("the problem is %q", f.Problem("none0"))
		}
	}
}
