package l2

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/mdlayher/arp"
	"github.com/mdlayher/ndp"

	"github.com/steelyard-lb/steelyard/lb/lbtest/must"
)

var (
	ownMAC   = net.HardwareAddr{2, 0, 0, 0, 0, 0xaa}
	otherMAC = net.HardwareAddr{2, 0, 0, 0, 0, 0xbb}
)

// fakeSystem has one interface. It records sent frames.
type fakeSystem struct {
	mu      sync.Mutex
	ifi     net.Interface
	missing error // error of byName
	deaf    bool  // receives nothing
	noARP   error
	noNDP   error
	opened  []*fakeSocket
	sent    []string
}

func newFakeSystem() *fakeSystem {
	return &fakeSystem{ifi: net.Interface{Index: 7, Name: "eth0", Flags: up, HardwareAddr: ownMAC}}
}

// use makes a's responders use f.
func (f *fakeSystem) use(a *Announcer) {
	for _, r := range a.responders {
		r.sys = system{
			byName: f.byName, byIndex: func(int) (*net.Interface, error) { return f.byName("") },
			openARP: f.openARP, openNDP: f.openNDP,
			neighbours: func(int) []knownHost { return f.asked(r) },
		}
	}
}

// asked knows no neighbours, but makes r hear a host unless the fake is deaf.
func (f *fakeSystem) asked(r *responder) []knownHost {
	f.mu.Lock()
	defer f.mu.Unlock()
	if !f.deaf {
		r.hear()
	}
	return nil
}

func (f *fakeSystem) change(change func()) {
	f.mu.Lock()
	defer f.mu.Unlock()
	change()
}

func (f *fakeSystem) byName(string) (*net.Interface, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	ifi := f.ifi
	return &ifi, f.missing
}

func (f *fakeSystem) open() *fakeSocket {
	s := &fakeSocket{system: f, in: make(chan frame), closed: make(chan struct{})}
	f.opened = append(f.opened, s)
	return s
}

func (f *fakeSystem) openARP(*net.Interface) (arpConn, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.noARP != nil {
		return nil, f.noARP
	}
	return fakeARP{f.open()}, nil
}

func (f *fakeSystem) openNDP(ifi *net.Interface) (*ndpSocket, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.noNDP != nil {
		return nil, f.noNDP
	}
	return &ndpSocket{ifi, netip.MustParseAddr("fe80::aa"), fakeNDP{f.open()}, fakeFrames{f.open()}}, nil
}

func (f *fakeSystem) record(format string, args ...any) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.sent = append(f.sent, fmt.Sprintf(format, args...))
	return nil
}

// take returns and clears the recorded frames.
func (f *fakeSystem) take() []string {
	f.mu.Lock()
	defer f.mu.Unlock()
	sent := f.sent
	f.sent = nil
	return sent
}

// counts returns how many sockets were opened, and how many are still open.
func (f *fakeSystem) counts() (opened, left int) {
	f.mu.Lock()
	defer f.mu.Unlock()
	for _, s := range f.opened {
		select {
		case <-s.closed:
		default:
			left++
		}
	}
	return len(f.opened), left
}

// frame is the next received frame.
type frame struct {
	arp *arp.Packet
	raw []byte
	err error
}

type fakeSocket struct {
	system *fakeSystem
	in     chan frame
	closed chan struct{}
}

func (s *fakeSocket) Close() error { close(s.closed); return nil }

func (s *fakeSocket) read() frame {
	select {
	case f := <-s.in:
		return f
	case <-s.closed:
		return frame{err: &net.OpError{Op: "read", Err: net.ErrClosed}}
	}
}

type fakeARP struct{ *fakeSocket }

func (s fakeARP) Read() (*arp.Packet, error) {
	f := s.read()
	return f.arp, f.err
}

func (s fakeARP) WriteTo(p *arp.Packet, to net.HardwareAddr) error {
	return s.system.record("%d from %s %s for %s %s to %s", p.Operation, p.SenderHardwareAddr, p.SenderIP,
		p.TargetHardwareAddr, p.TargetIP, to)
}

type fakeNDP struct{ *fakeSocket }

func (s fakeNDP) joinGroup(group netip.Addr) error  { return s.system.record("join %s", group) }
func (s fakeNDP) leaveGroup(group netip.Addr) error { return s.system.record("leave %s", group) }

func (s fakeNDP) send(m ndp.Message, from, to netip.Addr, mac net.HardwareAddr) error {
	if ns, ok := m.(*ndp.NeighborSolicitation); ok {
		return s.system.record("solicit %s from %s at %s, %d options", ns.TargetAddress, from, to, len(ns.Options))
	}
	na := m.(*ndp.NeighborAdvertisement)
	target := na.Options[0].(*ndp.LinkLayerAddress)
	if !na.Override || na.Router || target.Direction != ndp.Target || from.String() != "fe80::aa" {
		return fmt.Errorf("advertisement %+v from %s", na, from)
	}
	return s.system.record("advertise to %s %s: %s is at %s, solicited %t",
		to, mac, na.TargetAddress, target.Addr, na.Solicited)
}

type fakeFrames struct{ *fakeSocket }

func (s fakeFrames) ReadFrom(b []byte) (int, net.Addr, error) {
	f := s.read()
	return copy(b, f.raw), nil, f.err
}

func (fakeFrames) WriteTo([]byte, net.Addr) (int, error) { return 0, errors.ErrUnsupported }
func (fakeFrames) LocalAddr() net.Addr                   { return nil }
func (fakeFrames) SetDeadline(time.Time) error           { return nil }
func (fakeFrames) SetReadDeadline(time.Time) error       { return nil }
func (fakeFrames) SetWriteDeadline(time.Time) error      { return nil }

// serving returns an announcer that owns vips. Its open sockets come from f.
func serving(t *testing.T, log *lines, f *fakeSystem, vips ...netip.Addr) (*Announcer, *responder, *sockets) {
	t.Helper()
	a := newAnnouncer(t, log, "eth0")
	f.use(a)
	set(t, a, vips...)
	r := a.responders[0]
	s := must.Get(r.openSockets())(t)
	r.use(s)
	return a, r, s
}

func wantSent(t *testing.T, what string, f *fakeSystem, want ...string) {
	t.Helper()
	got := f.take()
	must.True(t, slices.Equal(got, want), "%s: sent\n%q\nwant\n%q", what, got, want)
}
