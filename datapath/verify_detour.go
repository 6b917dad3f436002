package datapath

import (
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"time"

	"golang.org/x/sys/unix"

	"github.com/steelyard-lb/steelyard/lb"
)

// When the link or the address towards the servers is lost, a default route still leads somewhere: the kernel forwards,
// and nothing answers. So a backend that was on a link, or behind another route, and to which now a router or the
// default route leads, must answer once by the new way. A TCP handshake with its port tells: a reset is an answer, too.

const (
	// answerTime is the time that backends have. Until then nothing is a fault.
	answerTime = 300 * time.Millisecond
	// silentFor is how long a service other than TCP has a fault: its servers need not answer TCP, and health checks
	// have decided by then.
	silentFor = 30 * time.Second
	// maxCalls is how many backends of a detour are called at a time: one that answers is enough.
	maxCalls = 8
	// callRounds is how many rounds of calls wait for an answer: a round lasts verifyEvery.
	callRounds = 4
)

// detour is a change of the first step towards backends that makes it uncertain that they are reached.
type detour struct{ from, to firstHop }

// detours are those by which no backend has answered yet.
type detours struct {
	of     map[netip.Addr]detour
	doubts map[detour]*doubt
}

// doubt is a detour that is being tried.
type doubt struct {
	since    time.Time
	backends []netip.AddrPort
	calls    [][]int // sockets that are connecting, by round
	// blind: this node could not call, for a reason that says nothing about the way.
	blind bool
}

// follow records the first step towards a backend.
func (b *backend) follow(now firstHop) {
	if now != b.firstHop && now != b.certain && now.nic != 0 && !uncertain(b.at.Addr(), b.certain, now) {
		b.certain = now
	}
	b.firstHop = now
}

// uncertain reports whether a change of the first step to a backend may lead elsewhere: to a router instead of the
// link, or by the default route.
func uncertain(to netip.Addr, from, now firstHop) bool {
	if from.nic == 0 {
		return false
	}
	if now.gw.IsValid() && !from.gw.IsValid() {
		return true
	}
	bits, ok := routeBits(to)
	return ok && bits == 0
}

// detours returns the backends to which the first step is uncertain. Nodes with this datapath have no port to call.
func (s *services) detours() map[netip.AddrPort]detour {
	s.mu.Lock()
	defer s.mu.Unlock()
	all := map[netip.AddrPort]detour{}
	for at, b := range s.backends.byAddr {
		if b.firstHop != b.certain && b.nic != 0 && !b.local && b.tables > 0 && at.Port() != 0 {
			all[at] = detour{b.certain, b.firstHop}
		}
	}
	return all
}

// accept makes the first step of a detour certain.
func (s *services) accept(x detour) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, b := range s.backends.byAddr {
		if x == (detour{b.certain, b.firstHop}) {
			b.certain = b.firstHop
		}
	}
}

// look begins doubts, and ends those of which the reason is gone.
func (d *detours) look(now time.Time, found map[netip.AddrPort]detour) {
	doubts := map[detour]*doubt{}
	d.of = map[netip.Addr]detour{}
	for at, x := range found {
		d.of[at.Addr()] = x
		if doubts[x] == nil {
			if doubts[x] = d.doubts[x]; doubts[x] == nil {
				doubts[x] = &doubt{since: now}
			}
			doubts[x].backends = nil
		}
		doubts[x].backends = append(doubts[x].backends, at)
	}
	for x, b := range d.doubts {
		if doubts[x] == nil {
			b.hangUp(0)
		}
	}
	d.doubts = doubts
}

// call ends the doubts that were answered, and calls again where there was no answer.
func (d *detours) call(accept func(detour)) {
	for x, b := range d.doubts {
		if !b.answered() {
			b.call()
			continue
		}
		b.hangUp(0)
		delete(d.doubts, x)
		maps.DeleteFunc(d.of, func(_ netip.Addr, of detour) bool { return of == x })
		accept(x)
	}
}

func (b *doubt) call() {
	b.hangUp(callRounds - 1)
	b.blind = false
	var calls []int
	slices.SortFunc(b.backends, func(x, y netip.AddrPort) int { return x.Compare(y) })
	step := max(1, len(b.backends)/maxCalls)
	for i := 0; i < len(b.backends) && len(calls) < maxCalls; i += step {
		fd, err := dial(b.backends[i])
		if err != nil {
			b.blind = b.blind || !errors.Is(err, unix.ENETUNREACH) && !errors.Is(err, unix.EHOSTUNREACH)
			continue
		}
		calls = append(calls, fd)
	}
	b.calls = append(b.calls, calls)
}

// answered reports whether a backend has answered.
func (b *doubt) answered() bool {
	return slices.ContainsFunc(b.calls, func(calls []int) bool { return slices.ContainsFunc(calls, hasAnswered) })
}

// hangUp ends all calls but those of the last rounds.
func (b *doubt) hangUp(keep int) {
	for len(b.calls) > keep {
		for _, fd := range b.calls[0] {
			unix.Close(fd)
		}
		b.calls = b.calls[1:]
	}
}

// dial begins a TCP handshake.
func dial(to netip.AddrPort) (fd int, err error) {
	family, at := unix.AF_INET6, unix.Sockaddr(&unix.SockaddrInet6{Addr: to.Addr().As16(), Port: int(to.Port())})
	if to.Addr().Is4() {
		family, at = unix.AF_INET, &unix.SockaddrInet4{Addr: to.Addr().As4(), Port: int(to.Port())}
	}
	fd, err = unix.Socket(family, unix.SOCK_STREAM|unix.SOCK_NONBLOCK|unix.SOCK_CLOEXEC, unix.IPPROTO_TCP)
	if err != nil {
		return 0, err
	}
	// When it is closed, a connection ends with a reset and leaves nothing behind.
	err = unix.SetsockoptLinger(fd, unix.SOL_SOCKET, unix.SO_LINGER, &unix.Linger{Onoff: 1})
	if err == nil {
		err = unix.Connect(fd, at)
	}
	if err != nil && !errors.Is(err, unix.EINPROGRESS) {
		unix.Close(fd)
		return 0, err
	}
	return fd, nil
}

// hasAnswered reports whether the other host has accepted or refused a connection.
func hasAnswered(fd int) bool {
	poll := []unix.PollFd{{Fd: int32(fd), Events: unix.POLLOUT}}
	if n, err := unix.Poll(poll, 0); err != nil || n == 0 {
		return false
	}
	code, err := unix.GetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_ERROR)
	return err == nil && (code == 0 || unix.Errno(code) == unix.ECONNREFUSED)
}

// wayFault returns why packets do not get to the backend of a verdict; "": nothing is known.
func (v *verifier) wayFault(q lb.Question, x syExplained) string {
	if x.V.Local == 1 || x.V.Counted != 2 {
		return ""
	}
	to, hop := v.d.services.firstHop(x.V.Backend)
	if fault := v.detours.fault(to, q.Protocol, v.view); fault != "" || !hop.gw.IsValid() {
		return fault
	}
	return v.routers.fault(to, "towards "+to.String())
}

// firstHop returns the address of a backend, and the first step towards it.
func (s *services) firstHop(id uint32) (to netip.Addr, hop firstHop) {
	s.mu.Lock()
	defer s.mu.Unlock()
	b := s.backends.byID[id]
	if b == nil {
		return to, hop
	}
	return b.at.Addr(), b.firstHop
}

// fault returns why packets do not get to a backend; "": nothing is known.
func (d *detours) fault(to netip.Addr, proto lb.Protocol, v view) string {
	x, ok := d.of[to]
	if !ok {
		return ""
	}
	b, age := d.doubts[x], time.Since(d.doubts[x].since)
	if age < answerTime || b.blind || proto != lb.TCP && age > silentFor {
		return ""
	}
	return fmt.Sprintf("%s does not answer since its route changed from %s to %s",
		to, v.step(x.from), v.step(x.to))
}

// step returns a text for the first step of a route.
func (v view) step(w firstHop) string {
	if w.gw.IsValid() {
		return fmt.Sprintf("%s on %s", w.gw, v.name(uint32(w.nic)))
	}
	return v.name(uint32(w.nic))
}
