package doctor

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"net"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/steelyard-lb/steelyard/lb"
)

// serverRoutes finds servers with dsr or tunnel whose answers to clients get lost, because their default route is
// missing or wrong. The answers to checks take another path, on the link that they share with this node. So the check
// asks from an address of this node that is not on that link. As the server or its router may filter that, a server is
// only suspicious if another one on the same link answers, and it does not answer TCP either.
func serverRoutes(ctx context.Context, n *Node) ([]lb.Finding, string) {
	servers := n.servers(lb.MethodDSR, lb.MethodTunnel)
	if len(servers) == 0 {
		return nil, "no service uses dsr or tunnel"
	}
	own := ownPrefixes()
	groups := map[question][]netip.Addr{}
	for _, s := range servers {
		if q, ok := n.farFrom(s, own); ok {
			groups[q] = append(groups[q], s)
		}
	}
	maps.DeleteFunc(groups, func(_ question, group []netip.Addr) bool { return len(group) < 2 })
	if len(groups) == 0 {
		return nil, "this node has no address that two servers reach through their router"
	}
	var (
		faults []fault
		failed error
		asking sync.WaitGroup
		mu     sync.Mutex // guards faults and failed
	)
	for q, group := range groups {
		asking.Go(func() {
			some, err := n.lost(ctx, q, group)
			mu.Lock()
			defer mu.Unlock()
			faults, failed = append(faults, some...), cmp.Or(err, failed)
		})
	}
	asking.Wait()
	if failed != nil && len(faults) == 0 {
		return nil, cannotAsk(failed)
	}
	slices.SortFunc(faults, func(a, b fault) int { return strings.Compare(a.text, b.text) })
	return merged(lb.FoundServerRoute, faults), ""
}

// lost returns the servers of a group whose answers to the far address get lost.
func (n *Node) lost(ctx context.Context, q question, group []netip.Addr) (faults []fault, err error) {
	near, far := map[netip.Addr]int{}, map[netip.Addr]int{}
	for range 3 {
		for from, count := range map[netip.Addr]map[netip.Addr]int{{}: near, q.from: far} {
			requests := make([]*echo, len(group))
			for i, s := range group {
				requests[i] = &echo{to: s, size: smallest}
			}
			if err := ping(ctx, from, 400*time.Millisecond, requests); err != nil {
				return nil, err
			}
			for _, e := range requests {
				count[e.to] += one(e.answer == replied)
			}
		}
	}
	i := slices.IndexFunc(group, func(s netip.Addr) bool { return far[s] > 0 })
	if i < 0 {
		return nil, nil
	}
	sibling := group[i]
	suspects := slices.DeleteFunc(group, func(s netip.Addr) bool { return near[s] < 2 || far[s] > 0 })
	for _, s := range failing(ctx, suspects, func(s netip.Addr) bool { return n.answersTCP(ctx, s, q.from) }) {
		faults = append(faults, fault{s.String(), fmt.Sprintf("%s answers on its own link, but its answers to %s, "+
			"which is behind its router, do not arrive; those of %s do", s, q.from, sibling)})
	}
	return faults, nil
}

// answersTCP reports whether a server answers a connection from an address, even with a reset, because it may filter
// only ping.
func (n *Node) answersTCP(ctx context.Context, server, from netip.Addr) bool {
	i := slices.IndexFunc(n.Status.Backends, func(b lb.BackendStatus) bool { return b.Address == server })
	if i < 0 {
		return false
	}
	d := net.Dialer{Timeout: 700 * time.Millisecond, LocalAddr: &net.TCPAddr{IP: from.AsSlice()}}
	c, err := d.DialContext(ctx, "tcp", netip.AddrPortFrom(server, n.Status.Backends[i].Port).String())
	if err == nil {
		c.Close()
	}
	return err == nil || errors.Is(err, syscall.ECONNREFUSED)
}

// question is the address from which servers on a link are asked.
type question struct {
	from netip.Addr
	link netip.Prefix // that the servers share with this node
}

// farFrom returns an address of this node that is not on the link that a server shares with this node.
func (n *Node) farFrom(server netip.Addr, own []netip.Prefix) (q question, ok bool) {
	p, known := pathTo(server)
	if !known || p.router.IsValid() { // then the checks take the same path
		return q, false
	}
	for _, o := range own {
		if o.Contains(server) {
			q.link = o.Masked()
		}
	}
	for _, o := range own {
		if q.link.IsValid() && o.Addr().Is4() == server.Is4() && !o.Contains(server) && !q.link.Contains(o.Addr()) &&
			!n.isVIP(o.Addr()) {
			q.from = o.Addr()
			return q, true
		}
	}
	return q, false
}

func (n *Node) isVIP(a netip.Addr) bool {
	for _, r := range n.Status.Routes {
		if r.Address == a {
			return true
		}
	}
	return false
}
