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

// When the link or the address towards the servers is lost, a default route still leads somewhere: the kernel forwards,
// and nothing answers. So if a backend was on a link or behind another route, and now a router or the default route
// leads to it, it must answer once over the new route. A TCP handshake with its port shows that; a reset counts as an
// answer.

const (
	// responseTime is how long backends may take to answer. Until then nothing is a fault.
	responseTime = 300 * time.Millisecond
	// faultFor is how long the fault of a non-TCP service lasts: its servers need not answer TCP, and health checks
	// have decided by then.
	faultFor = 30 * time.Second
	// maxProbes bounds how many backends of a reroute are probed at a time: one answer is enough.
	maxProbes = 8
	// probeRounds is how many rounds of probes wait for an answer. A round lasts route.Tick.
	probeRounds = 4
)

// reroutes holds the reroutes over which no backend has answered yet.
type reroutes struct {
	of      map[netip.Addr]table.Reroute
	probing map[table.Reroute]*rerouteProbe
}

// rerouteProbe is the probing of a reroute.
type rerouteProbe struct {
	since    time.Time
	backends []netip.AddrPort
	probes   [][]int // sockets that are connecting, by round
	// unable means that this node could not probe, for a reason that says nothing about the route.
	unable bool
}

// Look starts probing new reroutes, and stops probing those that no longer exist.
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

// probe accepts the reroutes over which a backend has answered, and probes the others again.
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

// closeProbes ends all probes except those of the last keep rounds.
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
	// Closing the socket resets the connection and leaves nothing behind.
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

// HasResponded reports whether the other host has accepted or refused a connection.
func HasResponded(fd int) bool {
	poll := []unix.PollFd{{Fd: int32(fd), Events: unix.POLLOUT}}
	if n, err := unix.Poll(poll, 0); err != nil || n == 0 {
		return false
	}
	code, err := unix.GetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_ERROR)
	// The kernel reports an error only once, and then none.
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
	text := fmt.Sprintf("%s does not answer since its route changed from %s to %s", to, v.step(x.From), v.step(x.To))
	if v.IsDown(x.From.NIC) {
		text += fmt.Sprintf("; %s is down", v.Name(uint32(x.From.NIC)))
	}
	return text
}

// step describes a next hop for messages.
func (v view) step(w route.Hop) string {
	if w.Gateway.IsValid() {
		return fmt.Sprintf("%s on %s", w.Gateway, v.Name(uint32(w.NIC)))
	}
	return v.Name(uint32(w.NIC))
}
