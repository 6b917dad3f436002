package doctor

import (
	"context"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"time"

	"golang.org/x/sys/unix"

	"github.com/steelyard-lb/steelyard/lb"
)

// The check sends each size several times, because packets can be lost for other reasons. It waits after each time.
const (
	mtuRounds = 3
	mtuWait   = 500 * time.Millisecond
)

// suspectsMax bounds the addresses to which the check sends many sizes. With more, the cause is the same.
const suspectsMax = 20

// leastMTU is the smallest MTU of a path that the check believes in (RFC 8200 §5). A host that answers only smaller
// requests filters large ones.
const leastMTU = 1280

// usualMTU bounds the requests to servers that get packets without a tunnel: a TCP client sends no larger ones than the
// server permits, and the server's own limit is not known.
const usualMTU = 1500

// commonMTUs are the sizes that the check tries to find the MTU of a path.
var commonMTUs = []int{1280, 1300, 1350, 1380, 1400, 1420, 1430, 1436, 1440, 1450, 1454, 1460, 1464, 1468, 1472, 1476,
	1480, 1484, 1488, 1492, 1496, 1499, 2000, 4000, 8000, 8900, 8950}

// sized is what is known about the path to an address.
type sized struct {
	to     netip.Addr
	ports  []netip.AddrPort // of the server
	size   int              // of large requests
	small  int              // answered small requests
	passes int              // the largest size that was answered
	told   bool             // a router says that a request is too big, as it should
}

// mtu finds paths that lose large packets without an ICMP error. Their connections open, and then hang.
func mtu(ctx context.Context, n *Node) ([]lb.Finding, string) {
	all := n.sized()
	if len(all) == 0 {
		return nil, "there are no servers and routers"
	}
	for range mtuRounds {
		var requests []*echo
		for _, t := range all {
			requests = append(requests, &echo{to: t.to, size: smallest})
			if t.passes < t.size {
				requests = append(requests, &echo{to: t.to, size: t.size})
			}
		}
		if err := ping(ctx, netip.Addr{}, mtuWait, requests); err != nil {
			return nil, cannotAsk(err)
		}
		note(all, requests)
	}
	answering := 0
	for _, t := range all {
		answering += one(t.small > 0)
	}
	if answering == 0 {
		return nil, "no server or router answers ping"
	}
	suspects := slices.DeleteFunc(all, func(t *sized) bool {
		return t.small < mtuRounds-1 || t.told || t.passes >= t.size
	})
	suspects = suspects[:min(suspectsMax, len(suspects))]
	var requests []*echo
	for _, t := range suspects {
		for _, size := range commonMTUs {
			if size < t.size {
				requests = append(requests, &echo{to: t.to, size: size}, &echo{to: t.to, size: size})
			}
		}
	}
	if err := ping(ctx, netip.Addr{}, mtuWait, requests); err != nil {
		return nil, cannotAsk(err)
	}
	note(suspects, requests)
	suspects = slices.DeleteFunc(suspects, func(t *sized) bool { return t.told || t.passes < leastMTU })
	var faults []fault
	for _, t := range failing(ctx, suspects, func(t *sized) bool { return t.permitted(ctx) }) {
		faults = append(faults, fault{t.to.String(), fmt.Sprintf(
			"packets of %d bytes to %s are lost, and no router says that they are too big; %d bytes pass",
			t.size, t.to, t.passes)})
	}
	return merged(lb.FoundMTU, faults), ""
}

func one(b bool) int {
	if b {
		return 1
	}
	return 0
}

// sized returns the servers and the routers, with the size of packets that this node sends to them.
func (n *Node) sized() (all []*sized) {
	at := map[netip.Addr]*sized{}
	add := func(to netip.Addr, atMost int) *sized {
		p, ok := pathTo(to)
		if t := at[to]; t != nil || !ok || len(all) == targetsMax {
			return t
		}
		t := &sized{to: to, size: min(p.mtu, atMost)}
		if t.size > smallest {
			at[to], all = t, append(all, t)
		}
		return at[to]
	}
	for _, s := range n.Status.Services {
		atMost := usualMTU
		if s.Forward == lb.MethodTunnel {
			atMost = 1 << 16
		}
		for _, b := range s.Backends {
			t := add(b.Address, atMost)
			if t != nil && s.Protocol == lb.TCP && s.Forward == lb.MethodNAT {
				t.ports = append(t.ports, netip.AddrPortFrom(b.Address, b.Port))
			}
		}
	}
	for _, p := range n.Peers {
		if p.established() && p.Peer.Zone() == "" {
			add(p.Peer, usualMTU)
		}
	}
	return all
}

// note adds the answers to what is known.
func note(all []*sized, requests []*echo) {
	at := map[netip.Addr]*sized{}
	for _, t := range all {
		at[t.to] = t
	}
	for _, e := range requests {
		t := at[e.to]
		switch {
		case e.answer == tooBig:
			t.told = true
		case e.answer == replied:
			t.passes = max(t.passes, e.size)
			t.small += one(e.size == smallest)
		}
	}
}

// permitted reports whether the server tells its TCP clients to send only packets that pass, as a server does whose own
// link has a smaller MTU.
func (t *sized) permitted(ctx context.Context) bool {
	const ipAndTCP, timestamps = 20, 12 // added to the IP header
	for _, to := range t.ports[:min(3, len(t.ports))] {
		ctx, cancel := context.WithTimeout(ctx, time.Second)
		c, err := new(net.Dialer).DialContext(ctx, "tcp", to.String())
		cancel()
		if err != nil {
			continue
		}
		defer c.Close()
		raw, err := c.(*net.TCPConn).SyscallConn()
		if err != nil {
			continue
		}
		var info *unix.TCPInfo
		raw.Control(func(fd uintptr) { info, err = unix.GetsockoptTCPInfo(int(fd), unix.IPPROTO_TCP, unix.TCP_INFO) })
		if err != nil {
			continue
		}
		size := int(info.Snd_mss) + ipHeader(t.to) + ipAndTCP
		if info.Options&1 != 0 { // TCPI_OPT_TIMESTAMPS
			size += timestamps
		}
		return size <= t.passes
	}
	return false
}
