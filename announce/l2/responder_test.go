package l2

import (
	"context"
	"errors"
	"io"
	"net"
	"net/netip"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/mdlayher/arp"
	"github.com/mdlayher/ndp"
	"github.com/prometheus/client_golang/prometheus/testutil"

	"github.com/steelyard-lb/steelyard/lb/lbtest/must"
)

func counted(a *Announcer) [2]float64 {
	return [2]float64{testutil.ToFloat64(a.metrics.replies.WithLabelValues("eth0")),
		testutil.ToFloat64(a.metrics.conflicts.WithLabelValues("eth0"))}
}

// wantAnswers checks what was sent in response to a frame, and the counters of replies and conflicts.
func wantAnswers(t *testing.T, name string, a *Announcer, f *fakeSystem, sent []string, want [2]float64) {
	t.Helper()
	due, _ := a.step(time.Now())
	a.sendAll(t.Context(), due)
	wantSent(t, name, f, sent...)
	must.Row(t, name+": replies and conflicts", want, counted(a))
}

// Requests for owned VIPs receive a reply. A frame whose sender address is an owned VIP is a conflict, unless the frame
// is our own.
func TestReadARP(t *testing.T) {
	host, other := netip.MustParseAddr("192.0.2.1"), vips[2]
	const ours = "2 from 02:00:00:00:00:aa 192.0.2.10 for 02:00:00:00:00:bb "
	const reply = ours + "192.0.2.1 to 02:00:00:00:00:bb"
	for _, tt := range []struct {
		name         string
		op           arp.Operation
		mac          net.HardwareAddr
		from, target netip.Addr
		sent         []string
		counted      [2]float64 // replies, conflicts
	}{
		{"request", arp.OperationRequest, otherMAC, host, vip4, []string{reply}, [2]float64{1, 0}},
		{"request for another address", arp.OperationRequest, otherMAC, host, other, nil, [2]float64{}},
		{"reply", arp.OperationReply, otherMAC, host, vip4, nil, [2]float64{}},
		{"our own request", arp.OperationRequest, ownMAC, vip4, vip4, nil, [2]float64{}},
		{"conflicting reply", arp.OperationReply, otherMAC, vip4, host, []string{ // defended
			"1 from 02:00:00:00:00:aa 192.0.2.10 for 00:00:00:00:00:00 192.0.2.10 to ff:ff:ff:ff:ff:ff",
			"2 from 02:00:00:00:00:aa 192.0.2.10 for ff:ff:ff:ff:ff:ff 192.0.2.10 to ff:ff:ff:ff:ff:ff",
		}, [2]float64{0, 1}},
		{"probe", arp.OperationRequest, otherMAC, netip.IPv4Unspecified(), vip4,
			[]string{ours + "0.0.0.0 to 02:00:00:00:00:bb"}, [2]float64{1, 0}},
	} {
		synctest.Test(t, func(t *testing.T) {
			f := newFakeSystem()
			a, r, s := serving(t, &lines{}, f, vip4)
			done := make(chan error)
			go func() { done <- r.readARP(s) }()
			in := s.arp.(fakeARP).in
			in <- frame{err: io.ErrUnexpectedEOF} // a frame with wrong lengths
			in <- frame{arp: &arp.Packet{
				Operation: tt.op, SenderHardwareAddr: tt.mac, SenderIP: tt.from, TargetIP: tt.target,
			}}
			synctest.Wait()
			wantAnswers(t, tt.name, a, f, tt.sent, tt.counted)
			down := &net.OpError{Op: "read", Err: errors.New("network is down")}
			in <- frame{err: down}
			must.Row(t, tt.name, error(down), <-done)
			s.close()
			must.Do(t, r.readARP(s))
		})
	}
}

// The same with neighbour discovery. Duplicate address detection uses the unspecified source.
func TestReadNDP(t *testing.T) {
	advertisement := func(mac net.HardwareAddr) []byte {
		return frameToUs(t, mac, "fe80::1", &ndp.NeighborAdvertisement{TargetAddress: vip6})
	}
	solicit := func(mac net.HardwareAddr, from string, vip netip.Addr) []byte {
		return frameToUs(t, mac, from, &ndp.NeighborSolicitation{TargetAddress: vip})
	}
	option := func(d ndp.Direction, mac net.HardwareAddr) []ndp.Option {
		return []ndp.Option{&ndp.LinkLayerAddress{Direction: d, Addr: mac}}
	}
	forged := net.HardwareAddr{2, 0, 0, 0, 0, 0x42}
	defence := []string{"advertise to ff02::1 33:33:00:00:00:01: 2001:db8::10 is at 02:00:00:00:00:aa, solicited false"}
	for _, tt := range []struct {
		name    string
		raw     []byte
		sent    []string
		counted [2]float64
	}{
		{"solicitation", solicit(otherMAC, "fe80::1", vip6),
			[]string{"advertise to fe80::1 02:00:00:00:00:bb: 2001:db8::10 is at 02:00:00:00:00:aa, solicited true"},
			[2]float64{1, 0}},
		{"duplicate address detection", solicit(otherMAC, "::", vip6), defence, [2]float64{1, 0}},
		{"duplicate address detection with a source link-layer address", frameToUs(t, otherMAC, "::",
			&ndp.NeighborSolicitation{TargetAddress: vip6, Options: option(ndp.Source, otherMAC)}), nil, [2]float64{}},
		{"solicitation for another address", solicit(otherMAC, "fe80::1", vips[3]), nil, [2]float64{}},
		{"our own solicitation", solicit(ownMAC, "fe80::1", vip6), nil, [2]float64{}},
		{"conflicting advertisement", advertisement(otherMAC), defence, [2]float64{0, 1}},
		{"our own advertisement", advertisement(ownMAC), nil, [2]float64{}},
		{"another MAC address in the option of a frame with ours", frameToUs(t, ownMAC, "fe80::1",
			&ndp.NeighborAdvertisement{TargetAddress: vip6, Options: option(ndp.Target, forged)}),
			defence, [2]float64{0, 1}},
		{"our MAC address in the option", frameToUs(t, otherMAC, "fe80::1",
			&ndp.NeighborAdvertisement{TargetAddress: vip6, Options: option(ndp.Target, ownMAC)}), nil, [2]float64{}},
		{"solicitation from the address", frameToUs(t, ownMAC, vip6.String(),
			&ndp.NeighborSolicitation{TargetAddress: vips[3], Options: option(ndp.Source, forged)}),
			defence, [2]float64{0, 1}},
	} {
		synctest.Test(t, func(t *testing.T) {
			f := newFakeSystem()
			a, r, s := serving(t, &lines{}, f, vip6)
			wantSent(t, tt.name, f, "join ff02::1:ff00:10")
			done := make(chan error)
			go func() { done <- r.readNDP(s) }()
			in := s.ndp.in.(fakeFrames).in
			in <- frame{raw: []byte("not valid")}
			in <- frame{raw: tt.raw}
			synctest.Wait()
			wantAnswers(t, tt.name, a, f, tt.sent, tt.counted)
			mac := otherMAC
			if strings.Contains(string(tt.raw), string(forged)) {
				mac = forged
			}
			c := a.Conflicts()
			must.True(t, len(c) == 0 || c[0].MAC == mac.String(), "%s: conflicts %+v", tt.name, c)
			down := errors.New("network is down")
			in <- frame{err: down}
			err := <-done
			must.True(t, errors.Is(err, down), "%s: ended with %v", tt.name, err)
			s.close()
			must.Do(t, r.readNDP(s))
		})
	}
}

// While a VIP is owned, an ARP request and a reply announce it, or an advertisement to all nodes.
func TestGratuitous(t *testing.T) {
	f := newFakeSystem()
	a, r, s := serving(t, &lines{}, f, vip4, vip6)
	f.take()
	r.gratuitous(t.Context(), []netip.Addr{vip4, vip6, vips[2]}, &a.pace)
	wantSent(t, "both families", f,
		"1 from 02:00:00:00:00:aa 192.0.2.10 for 00:00:00:00:00:00 192.0.2.10 to ff:ff:ff:ff:ff:ff",
		"2 from 02:00:00:00:00:aa 192.0.2.10 for ff:ff:ff:ff:ff:ff 192.0.2.10 to ff:ff:ff:ff:ff:ff",
		"advertise to ff02::1 33:33:00:00:00:01: 2001:db8::10 is at 02:00:00:00:00:aa, solicited false")
	must.Row(t, "counted", 2, testutil.ToFloat64(a.metrics.gratuitous.WithLabelValues("eth0")))
	s.ndp = nil
	r.gratuitous(t.Context(), []netip.Addr{vip6}, &a.pace)
	wantSent(t, "no IPv6", f)
	s.ifi.HardwareAddr = nil // a reply cannot be built
	r.gratuitous(t.Context(), []netip.Addr{vip4}, &a.pace)
	wantSent(t, "failure", f)
	must.Row(t, "counted after a failure", 3, testutil.ToFloat64(a.metrics.gratuitous.WithLabelValues("eth0")))
}

// A responder joins a multicast group with its first VIP, leaves it with the last, and joins it again on new sockets.
func TestGroups(t *testing.T) {
	f := newFakeSystem()
	a, r, _ := serving(t, &lines{}, f)
	shared := netip.MustParseAddr("2001:db8:1::10") // in vip6's group
	const group = "ff02::1:ff00:10"
	for _, tt := range []struct {
		name string
		vips []netip.Addr
		sent []string
	}{
		{"IPv4", []netip.Addr{vip4}, nil},
		{"first", []netip.Addr{vip6}, []string{"join " + group}},
		{"second of the group", []netip.Addr{vip6, shared}, nil},
		{"first removed", []netip.Addr{shared}, nil},
		{"last removed", nil, []string{"leave " + group}},
		{"again", []netip.Addr{vip4, vip6, shared}, []string{"join " + group}},
	} {
		set(t, a, tt.vips...)
		wantSent(t, tt.name, f, tt.sent...)
	}
	s := must.Get(r.openSockets())(t)
	r.use(s)
	wantSent(t, "new sockets", f, "join "+group)
}

func TestOpenSockets(t *testing.T) {
	broken := errors.New("broken")
	for _, tt := range []struct {
		name   string
		change func(f *fakeSystem)
		err    string
		opened int
	}{
		{"up", func(*fakeSystem) {}, "", 3},
		{"missing", func(f *fakeSystem) { f.missing = broken }, "broken", 0},
		{"down", func(f *fakeSystem) { f.ifi.Flags = net.FlagBroadcast }, "interface is down", 0},
		{"no carrier", func(f *fakeSystem) { f.ifi.Flags = net.FlagUp }, "interface has no carrier", 0},
		{"not Ethernet", func(f *fakeSystem) { f.ifi.HardwareAddr = nil }, "interface is not Ethernet", 0},
		{"no ARP", func(f *fakeSystem) { f.noARP = broken }, "open ARP: broken", 0},
		{"no NDP", func(f *fakeSystem) { f.noNDP = broken }, "", 1},
	} {
		f := newFakeSystem()
		tt.change(f)
		a := newAnnouncer(t, &lines{}, "eth0")
		f.use(a)
		s, err := a.responders[0].openSockets()
		must.Row(t, tt.name, tt.err != "", err != nil)
		if err != nil {
			must.Row(t, tt.name, tt.err, err.Error())
		} else {
			s.close()
		}
		opened, left := f.counts()
		must.Row(t, tt.name+": sockets, and those open after close", [2]int{tt.opened, 0}, [2]int{opened, left})
	}
}

// The sockets are reopened if the interface is replaced or down, and when IPv6 appears.
func TestServe(t *testing.T) {
	broken := errors.New("broken")
	for _, tt := range []struct {
		name   string
		noNDP  error
		change func(f *fakeSystem, changed chan struct{}, cancel func())
		err    error
		after  time.Duration
	}{
		{"end of the context", nil, func(_ *fakeSystem, _ chan struct{}, cancel func()) { cancel() }, nil, 0},
		{"unchanged", nil, func(_ *fakeSystem, changed chan struct{}, cancel func()) {
			changed <- struct{}{}
			time.AfterFunc(10*time.Second, cancel)
		}, nil, 10 * time.Second},
		{"down", nil, func(f *fakeSystem, changed chan struct{}, _ func()) {
			f.change(func() { f.ifi.Flags = 0 })
			changed <- struct{}{}
		}, nil, 0},
		{"deleted", nil, func(f *fakeSystem, changed chan struct{}, _ func()) {
			f.change(func() { f.missing = broken })
			changed <- struct{}{}
		}, broken, 0},
		{"ARP socket fails", nil, func(f *fakeSystem, _ chan struct{}, _ func()) {
			f.opened[0].in <- frame{err: &net.OpError{Err: broken}}
		}, broken, 0},
		{"NDP socket fails", nil, func(f *fakeSystem, _ chan struct{}, _ func()) {
			f.opened[2].in <- frame{err: broken}
		}, broken, 0},
		{"IPv6 appears", broken, func(f *fakeSystem, _ chan struct{}, _ func()) {
			time.Sleep(2500 * time.Millisecond)
			f.change(func() { f.noNDP = nil })
		}, nil, 3 * time.Second},
	} {
		synctest.Test(t, func(t *testing.T) {
			f := newFakeSystem()
			f.noNDP = tt.noNDP
			a := newAnnouncer(t, &lines{}, "eth0")
			a.o.Repeat = nil
			f.use(a)
			set(t, a, vip4)
			r := a.responders[0]
			ctx, cancel := context.WithCancel(t.Context())
			defer cancel()
			changed, done := make(chan struct{}), make(chan error, 1)
			r.changed = changed
			began := time.Now()
			go func() { done <- r.serve(ctx) }()
			synctest.Wait()
			n := len(f.take())
			must.True(t, n == 2, "%s: %d gratuitous frames; want 2", tt.name, n)
			tt.change(f, changed, cancel)
			err := <-done
			took := time.Since(began)
			must.True(t, errors.Is(err, tt.err) && (err == nil) == (tt.err == nil) && took == tt.after,
				"%s: %v after %s; want %v after %s", tt.name, err, took, tt.err, tt.after)
			_, left := f.counts()
			must.True(t, left == 0 && r.open == nil && r.groups == nil, "%s: %d sockets are left open", tt.name, left)
		})
	}
}

// A failing interface is tried once per second and on changes. Each cause is logged once until the interface is served.
func TestResponderRetries(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f, log := newFakeSystem(), &lines{}
		f.missing = errors.New("no such interface")
		a := newAnnouncer(t, log, "eth0")
		f.use(a)
		r, changed := a.responders[0], make(chan struct{})
		r.changed = changed
		var tries atomic.Int32
		var forwards atomic.Bool
		forwards.Store(true)
		a.Require(func(string) bool { return forwards.Load() })
		r.sys.byName = func(name string) (*net.Interface, error) { tries.Add(1); return f.byName(name) }
		ctx, cancel := context.WithCancel(t.Context())
		done := make(chan struct{})
		go func() { defer close(done); r.run(ctx) }()
		expect := func(what string, wantTries, failures, served int) {
			t.Helper()
			synctest.Wait()
			got := []int{int(tries.Load()), log.count("not replying on interface"),
				log.count(`msg="replying on interface"`)}
			must.Row(t, what, []int{wantTries, failures, served}, got)
		}
		expect("at first", 1, 1, 0)
		time.Sleep(2500 * time.Millisecond)
		expect("after 2.5 s", 3, 1, 0)
		changed <- struct{}{}
		expect("after a change", 4, 1, 0)
		f.change(func() { f.missing = errors.New("another cause") })
		changed <- struct{}{}
		expect("another cause", 5, 2, 0)
		f.change(func() { f.missing = nil })
		changed <- struct{}{}
		expect("present", 6, 2, 1)
		f.change(func() { f.ifi.Index = 8 })
		changed <- struct{}{}
		expect("another interface of this name", 8, 2, 2)
		f.change(func() { f.missing = errors.New("another cause") })
		changed <- struct{}{}
		expect("deleted", 9, 3, 2)
		time.Sleep(time.Second)
		expect("deleted for a second", 10, 4, 2)
		f.change(func() { f.missing = nil })
		changed <- struct{}{}
		expect("there again", 11, 4, 3)
		forwards.Store(false)
		time.Sleep(time.Second)
		expect("without programs", 11, 5, 3)
		_, left := f.counts()
		must.True(t, left == 0, "%d sockets are open on an interface that does not forward", left)
		forwards.Store(true)
		time.Sleep(time.Second)
		expect("with programs again", 12, 5, 4)
		cancel()
		<-done
	})
}

func TestUsable(t *testing.T) {
	was := newFakeSystem().ifi
	for _, tt := range []struct {
		name   string
		change func(i *net.Interface)
		want   bool
	}{
		{"unchanged", func(*net.Interface) {}, true},
		{"other flags", func(i *net.Interface) { i.Flags |= net.FlagMulticast }, true},
		{"no carrier", func(i *net.Interface) { i.Flags = net.FlagUp }, false},
		{"down", func(i *net.Interface) { i.Flags = net.FlagRunning }, false},
		{"other index", func(i *net.Interface) { i.Index++ }, false},
		{"other MAC", func(i *net.Interface) { i.HardwareAddr = otherMAC }, false},
	} {
		now := was
		tt.change(&now)
		must.Row(t, tt.name, tt.want, usable(&was, &now))
	}
}
