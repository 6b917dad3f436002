package inside

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/steelyard-lb/steelyard/datapath/inside/internal/prog"
	"github.com/steelyard-lb/steelyard/datapath/internal/flow"
	"github.com/steelyard-lb/steelyard/lb"
)

// TCP connections to an endpoint that has left its Service go on. This file resets those that nothing answers any more,
// which would otherwise hang until they time out.

// silentFor is how long an endpoint that has left may leave a connection without an answer, in seconds.
const silentFor = 10

// silentRetransmits is how often the kernel has then sent a segment again: with its shortest timeout of 200 ms, six
// times take 12.6 s (RFC 6298, 5.5).
const silentRetransmits = 6

// leftPort is a TCP endpoint that gets no new connections through a port of a Service.
type leftPort struct {
	to       prog.ServiceKey // without a scope
	endpoint prog.Endpoint
}

// left is what is known about a leftPort.
type left struct {
	since uint32 // as uptime
	ended bool   // its pod has ended
	pod   bool   // a route has led to it as a pod of this node
	// missing counts the consecutive checks since pod was set that have not found this route.
	missing int
}

// leave notes TCP endpoints that have left, so that endLeft follows their connections. The caller holds i.mu.
func (i *Inside) leave(all []gone) {
	for _, g := range all {
		g.key.Scope = 0
		p := leftPort{g.key, toEndpoint(g.endpoint)}
		l := i.left[p]
		if l == nil {
			l = &left{since: uptime(), pod: i.devices.toPods(g.endpoint.Addr()) != ""}
			i.left[p] = l
		}
		l.ended = l.ended || g.ended
		i.endSoon = i.endSoon || g.ended
	}
}

// connection is one to an endpoint that has left.
type connection struct {
	through leftPort
	silent  bool // it has had no answer for silentFor
	end     func() error
}

// silence is since when a flow has had no answer.
type silence struct {
	since uint32 // as uptime
	seen  uint32 // when the last answer came
}

// endLeft resets the connections to endpoints that have left if nothing answers them any more: the pod has ended, its
// device is gone, or the endpoint has not answered for silentFor.
func (i *Inside) endLeft() error {
	i.mu.Lock()
	all := map[leftPort]left{}
	for p, l := range i.left {
		all[p] = *l
	}
	i.endSoon = false
	i.mu.Unlock()
	if len(all) == 0 {
		i.silent = nil
		return nil
	}
	reset, err := flow.NewResetter()
	if err != nil {
		return err
	}
	defer reset.Close()
	flows, err := i.leftFlows(all, reset)
	sockets, errSockets := i.leftSockets(all)
	if err = errors.Join(err, errSockets); err != nil {
		return err
	}
	i.mu.Lock()
	defer i.mu.Unlock()
	used := map[leftPort]bool{}
	var unsupported error
	for _, c := range slices.Concat(flows, sockets) {
		l := i.left[c.through]
		if _, checked := used[c.through]; !checked && l != nil {
			used[c.through] = i.isGone(c.through, l)
		}
		if l == nil || !used[c.through] && !c.silent || i.servesAgain(c.through) {
			continue
		}
		failed := c.end()
		if errors.Is(failed, unix.EOPNOTSUPP) {
			unsupported, failed = errors.New("connections to endpoints that are gone hang until they time out: the "+
				"kernel has no CONFIG_INET_DIAG_DESTROY"), nil
		}
		err = errors.Join(err, failed)
	}
	i.setFault("the node's connections", unsupported)
	maps.DeleteFunc(i.left, func(p leftPort, l *left) bool {
		_, has := used[p]
		return !has && uptime()-l.since > silentFor || i.servesAgain(p)
	})
	return err
}

// isGone reports whether nothing answers at an endpoint. The caller holds i.mu.
func (i *Inside) isGone(p leftPort, l *left) bool {
	a := fromAddr(p.endpoint.Addr)
	switch {
	case i.devices.toPods(a) != "":
		l.pod, l.missing = true, 0
	case l.pod && !i.own.addrs[a]:
		l.missing++
	}
	return l.ended || l.missing > 1 // or the route is just being replaced
}

// servesAgain reports whether an endpoint has returned. The caller holds i.mu.
func (i *Inside) servesAgain(p leftPort) bool {
	at := addrPort(p.endpoint.Addr, p.endpoint.Port)
	for _, k := range portKeys(prog.Endpoint{Addr: p.to.Addr, Port: p.to.Port}, p.to.Proto) {
		for _, k.Scope = range []uint8{prog.Inside, prog.Outside} {
			if e := i.services.at[k]; e != nil && slices.Contains(e.endpoints, at) {
				return true
			}
		}
	}
	return false
}

// findLeft returns the entry of all for an endpoint and the address and port by which a client has reached it.
func findLeft(all map[leftPort]left, to, endpoint prog.Endpoint) (p leftPort, l left, found bool) {
	for _, k := range portKeys(to, uint8(lb.TCP)) {
		p = leftPort{k, endpoint}
		if l, found = all[p]; found {
			return p, l, true
		}
	}
	return p, l, false
}

// leftFlows returns the connections in the table of flows.
func (i *Inside) leftFlows(all map[leftPort]left, reset *flow.Resetter) (found []connection, err error) {
	now, silent := uptime(), map[prog.FlowKey]silence{}
	err = i.flows.each(context.Background(), func(k prog.FlowKey, v prog.Flow) {
		if k.Proto != uint8(lb.TCP) || v.Flags&prog.Reply != 0 {
			return
		}
		p, l, is := findLeft(all, prog.Endpoint{Addr: k.T.Dst, Port: k.T.Dport},
			prog.Endpoint{Addr: v.To.Dst, Port: v.To.Dport})
		var reply prog.Flow
		if !is || i.flows.table.Lookup(other(k, v), &reply) != nil || other(other(k, v), reply) != k {
			return
		}
		// A SYN that is sent again opens another flow.
		if s := state(k.Proto, v.Flags, reply.Flags); s == lb.FlowClosed || s == lb.FlowHalfOpen {
			return
		}
		c := connection{through: p, end: func() error {
			service, client := addrPort(k.T.Dst, k.T.Dport), addrPort(k.T.Src, k.T.Sport)
			return errors.Join(reset.Reset(service, client, reply.Seq), i.flows.delete(k), i.flows.delete(other(k, v)))
		}}
		if v.Asks != 0 && int32(v.Seen-reply.Seen) > 0 {
			s, known := i.silent[k]
			if !known || s.seen != reply.Seen {
				s = silence{now, reply.Seen}
			}
			silent[k] = s
			c.silent = now-max(s.since, l.since) >= silentFor
		}
		found = append(found, c)
	})
	i.silent = silent
	return found, err
}

// leftSockets returns the connections that connect(2) has opened to an endpoint.
func (i *Inside) leftSockets(all map[leftPort]left) (found []connection, err error) {
	now, endpoints := uptime(), map[prog.Endpoint]bool{}
	for p := range all {
		endpoints[p.endpoint] = true
	}
	for _, family := range []uint8{unix.AF_INET, unix.AF_INET6} {
		list, err := whole(func() ([]*netlink.InetDiagTCPInfoResp, error) { return netlink.SocketDiagTCPInfo(family) })
		if err != nil {
			return nil, fmt.Errorf("list the TCP connections: %w", err)
		}
		for _, s := range list {
			m := s.InetDiagMsg
			endpoint := toEndpoint(ipPort(m.ID.Destination, m.ID.DestinationPort))
			if m.INode == 0 || !endpoints[endpoint] { // it is no longer a connection of a process
				continue
			}
			k := prog.SockKey{
				Cookie: uint64(m.ID.Cookie[1])<<32 | uint64(m.ID.Cookie[0]), Endpoint: endpoint, Proto: uint32(lb.TCP),
			}
			var to prog.Endpoint
			if i.objects.Connected.Lookup(k, &to) != nil { // straight to the endpoint
				continue
			}
			p, l, is := findLeft(all, to, endpoint)
			if !is {
				continue
			}
			c := connection{through: p, end: func() error {
				if err := flow.DestroySocket(m); err != nil && !errors.Is(err, unix.ENOENT) {
					return fmt.Errorf("end a connection to %s: %w", m.ID.Destination, err)
				}
				return nil
			}}
			if t := s.TCPInfo; t != nil && t.Retransmits >= silentRetransmits {
				c.silent = time.Duration(t.Last_ack_recv)*time.Millisecond >= silentFor*time.Second &&
					now-l.since >= silentFor
			}
			found = append(found, c)
		}
	}
	return found, nil
}

// prune ends UDP flows to endpoints that, according to the rules, no longer serve the port, because they left while no
// agent was running, and returns the endpoints of such TCP connections. Flows to ports without a rule stay until they
// are idle. The caller holds i.mu.
func (i *Inside) prune() (tcp []gone, err error) {
	serving, seen := newServing(i.services.at), map[leftPort]bool{}
	leaves := func(to prog.Endpoint, proto uint8, endpoint prog.Endpoint) bool {
		known, serves := serving.has(to, proto, endpoint)
		if !known || serves {
			return false
		}
		p := leftPort{prog.ServiceKey{Addr: to.Addr, Port: to.Port, Proto: proto}, endpoint}
		if proto == uint8(lb.TCP) && !seen[p] {
			seen[p] = true
			tcp = append(tcp, gone{key: p.to, endpoint: addrPort(endpoint.Addr, endpoint.Port)})
		}
		return proto == uint8(lb.UDP)
	}
	var failed error
	err = i.flows.each(context.Background(), func(k prog.FlowKey, v prog.Flow) {
		to := prog.Endpoint{Addr: k.T.Dst, Port: k.T.Dport}
		if leaves(to, k.Proto, prog.Endpoint{Addr: v.To.Dst, Port: v.To.Dport}) {
			failed = errors.Join(failed, i.flows.delete(k))
		}
	})
	var k prog.SockKey
	var to prog.Endpoint
	sockets := i.objects.Connected.Iterate()
	for sockets.Next(&k, &to) {
		leaves(to, uint8(k.Proto), k.Endpoint)
	}
	return tcp, errors.Join(err, failed, sockets.Err())
}
