package announce_test

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"strings"
	"sync"
	"testing"

	"github.com/google/go-cmp/cmp/cmpopts"
	"github.com/steelyard-lb/steelyard/announce"
	"github.com/steelyard-lb/steelyard/lb"
	"github.com/steelyard-lb/steelyard/lb/lbtest/must"
)

// recorder is an Announcer that records its last set. It can fail or block.
type recorder struct {
	mu    sync.Mutex
	last  []netip.Addr
	err   error
	block chan struct{} // Set waits until it is closed, unless it is nil
}

func (r *recorder) Set(ctx context.Context, announcements []lb.Announcement) error {
	if r.block != nil {
		select {
		case <-r.block:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	r.last = []netip.Addr{}
	for _, a := range announcements {
		r.last = append(r.last, a.VIP)
	}
	return r.err
}

func (r *recorder) got() []netip.Addr {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.last
}

func addrs(s ...string) []netip.Addr {
	out := []netip.Addr{}
	for _, a := range s {
		out = append(out, netip.MustParseAddr(a))
	}
	return out
}

func announcements() []lb.Announcement {
	return []lb.Announcement{
		{VIP: netip.MustParseAddr("203.0.113.1"), Weight: 1},
		{VIP: netip.MustParseAddr("203.0.113.2"), Weight: 1, By: []lb.AnnouncerKind{lb.AnnounceBGP}},
		{VIP: netip.MustParseAddr("203.0.113.3"), Weight: 1, By: []lb.AnnouncerKind{lb.AnnounceL2}},
		{VIP: netip.MustParseAddr("203.0.113.4"), Weight: 1, By: []lb.AnnouncerKind{lb.AnnounceL2, lb.AnnounceBGP}},
	}
}

func TestMuxFiltersByAnnouncer(t *testing.T) {
	bgp, l2 := &recorder{}, &recorder{}
	m := announce.NewMux(map[lb.AnnouncerKind]lb.Announcer{lb.AnnounceBGP: bgp, lb.AnnounceL2: l2})
	must.Do(t, m.Set(t.Context(), announcements()))
	want := map[*recorder][]netip.Addr{
		bgp: addrs("203.0.113.1", "203.0.113.2", "203.0.113.4"),
		l2:  addrs("203.0.113.1", "203.0.113.3", "203.0.113.4"),
	}
	for r, w := range want {
		must.Equal(t, w, r.got(), cmpopts.EquateComparable(netip.Addr{}))
	}
	must.Do(t, m.Set(t.Context(), nil))
	must.True(t, len(bgp.got()) == 0 && len(l2.got()) == 0, "after an empty set: bgp %v, l2 %v", bgp.got(), l2.got())
}

// A VIP whose only announcer is off is not announced, without an error.
func TestMuxOffAnnouncer(t *testing.T) {
	bgp := &recorder{}
	m := announce.NewMux(map[lb.AnnouncerKind]lb.Announcer{lb.AnnounceBGP: bgp})
	must.Do(t, m.Set(t.Context(), announcements()[2:3]))
	must.True(t, len(bgp.got()) == 0, "bgp announces %v, which is for l2 only", bgp.got())
	err := announce.NewMux(nil).Set(t.Context(), announcements())
	must.True(t, err == nil, "without any announcer: %v", err)
}

// If one announcer fails, a slow one still receives its set, and the error names the failed one.
func TestMuxFailureIsIndependent(t *testing.T) {
	broken := errors.New("no such device")
	bgp, l2 := &recorder{block: make(chan struct{})}, &recorder{err: broken}
	m := announce.NewMux(map[lb.AnnouncerKind]lb.Announcer{lb.AnnounceBGP: bgp, lb.AnnounceL2: l2})
	done := make(chan error, 1)
	go func() { done <- m.Set(t.Context(), announcements()) }()
	select {
	case err := <-done:
		t.Fatalf("returned before Set of bgp had returned: %v", err)
	default:
	}
	close(bgp.block)
	err := <-done
	must.True(t, errors.Is(err, broken) && err.Error() == "announce by l2: no such device", "error %q", err)
	must.True(t, len(bgp.got()) == 3, "bgp announces %v", bgp.got())
	bgp.err = errors.New("not running")
	err = m.Set(t.Context(), nil)
	must.True(t, err != nil && strings.Count(err.Error(), "announce by") == 2, "two failures, error %q", err)
}

// The calls are concurrent: each one blocks until the other has started.
func TestMuxConcurrent(t *testing.T) {
	var both sync.WaitGroup
	both.Add(2)
	meet := announcerFunc(func() { both.Done(); both.Wait() })
	m := announce.NewMux(map[lb.AnnouncerKind]lb.Announcer{lb.AnnounceBGP: meet, lb.AnnounceL2: meet})
	must.Do(t, m.Set(t.Context(), announcements()))
}

type announcerFunc func()

func (f announcerFunc) Set(context.Context, []lb.Announcement) error { f(); return nil }

// VIPs' errors are passed on by VIP. Any other error makes the whole call uncertain.
func TestMuxPassesErrorsOfVIPs(t *testing.T) {
	vip := netip.MustParseAddr("203.0.113.1")
	bgp, l2 := &recorder{err: lb.VIPErrors{vip: errors.New("b")}}, &recorder{}
	mux := announce.NewMux(map[lb.AnnouncerKind]lb.Announcer{lb.AnnounceBGP: bgp, lb.AnnounceL2: l2})
	for _, tt := range []struct {
		err  error // l2's error
		only bool  // only errors of VIPs
		want string
	}{
		{nil, true, "203.0.113.1: by bgp: b"},
		{lb.VIPErrors{vip: errors.New("l")}, true, "203.0.113.1: by bgp: b\nby l2: l"},
		{errors.New("all"), false, "announce by l2: all\n203.0.113.1: by bgp: b"},
	} {
		l2.err = tt.err
		err := mux.Set(t.Context(), announcements())
		if each, ok := err.(lb.VIPErrors); ok != tt.only || err.Error() != tt.want || ok && len(each) != 1 {
			t.Errorf("%v: %#v %v; want %q", tt.err, err, err, tt.want)
		}
	}
}

// printer is an announcer that prints its announcements.
type printer struct{ name string }

func (p printer) Set(_ context.Context, list []lb.Announcement) error {
	for _, a := range list {
		fmt.Println(p.name, a.VIP)
	}
	return nil
}

// An announcement without By is passed to every announcer, one with By to those in By.
func ExampleMux() {
	m := announce.NewMux(map[lb.AnnouncerKind]lb.Announcer{
		lb.AnnounceBGP: printer{"bgp"},
		lb.AnnounceL2:  printer{"l2"},
	})
	err := m.Set(context.Background(), []lb.Announcement{
		{VIP: netip.MustParseAddr("203.0.113.10"), Weight: 1},
		{VIP: netip.MustParseAddr("203.0.113.11"), Weight: 1, By: []lb.AnnouncerKind{lb.AnnounceBGP}},
	})
	fmt.Println(err)
	// Unordered output:
	// bgp 203.0.113.10
	// bgp 203.0.113.11
	// l2 203.0.113.10
	// <nil>
}
