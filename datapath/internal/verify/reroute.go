package verify

import (
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"time"

	"golang.org/x/sys/unix"

	"github.com/steelyard-lb/steelyard/datapath/internal/bpf"
	"github.com/steelyard-lb/steelyard/datapath/internal/route"
	"github.com/steelyard-lb/steelyard/datapath/internal/table"
	"github.com/steelyard-lb/steelyard/lb"
)

// When the link or address towards the servers is lost, a default route still leads somewhere. The kernel forwards the
// packets, but nothing answers. So if a backend was on a link or behind another route and is now reached through a
// router or the default route, it must answer once over the new route. A TCP handshake with its port shows that it
// does; a reset counts as an answer.

const (
	// responseTime is how long backends may take to answer before their silence is a fault.
	responseTime = 300 * time.Millisecond
	// faultFor is how long the fault of a non-TCP service lasts. Its servers need not answer TCP, and health checks
	// have decided by then.
	faultFor = 30 * time.Second
	// maxProbes bounds how many backends of a reroute are probed per round, because one answer is enough.
	maxProbes = 8
	// probeRounds is the number of rounds, of route.Tick each, for which a probe waits for an answer.
	probeRounds = 4
)

// reroutes holds the reroutes over which no backend has answered yet.
type reroutes struct {
	of      map[netip.Addr]table.Reroute
	probing map[table.Reroute]*rerouteProbe
}

// rerouteProbe probes the backends of one reroute.
type rerouteProbe struct {
	since    time.Time
	backends []netip.AddrPort
	probes   [][]int // sockets that are connecting, by round
	// unable says that this node could not probe, for a reason that says nothing about the route.
	unable bool
}

// look starts probing new reroutes, and stops probing those that no longer exist.
func (d *reroutes) look(now time.Time, found map[netip.AddrPort]table.Reroute) {
	probing := map[table.Reroute]*rerouteProbe{}
	d.of = map[netip.Addr]table.Reroute{}
	for at, x := range found {
		d.of[at.Addr()] = x
		if probing[x] == nil {
			if probing[x] = d.probing[x]; probing[x] == nil {
				probing[x] = &rerouteProbe{since: now}
			}
			probing[x].backends = nil
		}
		probing[x].backends = append(probing[x].backends, at)
	}
	for x, b := range d.probing {
		if probing[x] == nil {
			b.closeProbes(0)
		}
	}
	d.probing = probing
}

// probe accepts reroutes over which a backend has answered, and probes the others again.
func (d *reroutes) probe(accept func(table.Reroute)) {
	for x, b := range d.probing {
		if !b.responded() {
			b.probe()
			continue
		}
		b.closeProbes(0)
		delete(d.probing, x)
		maps.DeleteFunc(d.of, func(_ netip.Addr, of table.Reroute) bool { return of == x })
		accept(x)
	}
}

func (b *rerouteProbe) probe() {
	b.closeProbes(probeRounds - 1)
	b.unable = false
	var probes []int
	slices.SortFunc(b.backends, func(x, y netip.AddrPort) int { return x.Compare(y) })
	step := max(1, len(b.backends)/maxProbes)
	for i := 0; i < len(b.backends) && len(probes) < maxProbes; i += step {
		fd, err := Dial(b.backends[i])
		if err != nil {
			b.unable = b.unable || !errors.Is(err, unix.ENETUNREACH) && !errors.Is(err, unix.EHOSTUNREACH)
			continue
		}
		probes = append(probes, fd)
	}
	b.probes = append(b.probes, probes)
}

// responded reports whether a backend has answered.
func (b *rerouteProbe) responded() bool {
	return slices.ContainsFunc(b.probes, func(probes []int) bool { return slices.ContainsFunc(probes, HasResponded) })
}

// closeProbes closes all probes but the last keep rounds.
func (b *rerouteProbe) closeProbes(keep int) {
	for len(b.probes) > keep {
		for _, fd := range b.probes[0] {
			unix.Close(fd)
		}
		b.probes = b.probes[1:]
	}
}

// Dial begins a TCP handshake.
func Dial(to netip.AddrPort) (fd int, err error) {
	family, at := unix.AF_INET6, unix.Sockaddr(&unix.SockaddrInet6{Addr: to.Addr().As16(), Port: int(to.Port())})
	if to.Addr().Is4() {
		family, at = unix.AF_INET, &unix.SockaddrInet4{Addr: to.Addr().As4(), Port: int(to.Port())}
	}
	fd, err = unix.Socket(family, unix.SOCK_STREAM|unix.SOCK_NONBLOCK|unix.SOCK_CLOEXEC, unix.IPPROTO_TCP)
	if err != nil {
		return 0, err
	}
	// Make closing the socket reset the connection, which leaves nothing behind.
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

// HasResponded reports whether the other host has accepted or refused the connection.
func HasResponded(fd int) bool {
	poll := []unix.PollFd{{Fd: int32(fd), Events: unix.POLLOUT}}
	if n, err := unix.Poll(poll, 0); err != nil || n == 0 {
		return false
	}
	code, err := unix.GetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_ERROR)
	// The kernel reports an error only once, so a code of 0 alone does not mean success.
	connected := code == 0 && poll[0].Revents&(unix.POLLERR|unix.POLLHUP) == 0
	return err == nil && (connected || unix.Errno(code) == unix.ECONNREFUSED)
}

// wayFault returns why packets do not reach the backend of a verdict, or "" if nothing is known.
func (v *Verifier) wayFault(q lb.Question, x bpf.Explained) string {
	if x.V.Local == 1 || x.V.Counted != 2 {
		return ""
	}
	way := v.Services.Way(x.V.Backend)
	to, hop := way.At.Addr(), way.Hop
	fault := v.reroutes.fault(to, q.Protocol, v.view)
	next := route.Router{NIC: hop.NIC, Addr: hop.Gateway}
	if fault != "" || !v.Routers.Known[next].Failed { // an on-link backend has no router that could fail
		return fault
	}
	return v.Routers.Fault(to, "towards "+to.String(), &v.Routes)
}

// fault returns why packets do not reach a backend, or "" if nothing is known.
func (d *reroutes) fault(to netip.Addr, proto lb.Protocol, v view) string {
	x, ok := d.of[to]
	if !ok {
		return ""
	}
	b, age := d.probing[x], time.Since(d.probing[x].since)
	if age < responseTime || b.unable || proto != lb.TCP && age > faultFor {
		return ""
	}
	text := fmt.Sprintf("%s has not answered since its route changed from %s to %s", to, v.step(x.From), v.step(x.To))
	if v.IsDown(x.From.NIC) {
		text += fmt.Sprintf("; %s is down", v.Name(uint32(x.From.NIC)))
	}
	return text
}

// step describes a next hop in messages.
func (v view) step(w route.Hop) string {
	if w.Gateway.IsValid() {
		return fmt.Sprintf("%s on %s", w.Gateway, v.Name(uint32(w.NIC)))
	}
	return v.Name(uint32(w.NIC))
}
