package inside

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"sync/atomic"
	"time"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"

	"github.com/steelyard-lb/steelyard/datapath/inside/internal/prog"
	"github.com/steelyard-lb/steelyard/lb"
)

// How long an idle flow stays, in seconds. The first two are kube-proxy's (nf_conntrack_tcp_timeout_established and
// _close_wait).
const (
	idleEstablished = 86400
	idleHalfClosed  = 3600
	idleHalfOpen    = 40 // a client sends its SYN again after 1, 3, 7, 15 and 31 s
	idleClosed      = 10
	idleUDP         = 180
	idleShort       = 30 // UDP that has no answer, or only at once, as of DNS
)

// batch is the number of entries that one system call reads.
const batch = 4096

// flows removes entries of ended flows.
type flows struct {
	table, direct, outside *ebpf.Map
	counts                 atomic.Pointer[map[lb.Scope]int] // entries that the last sweep has read, or nil
}

// each calls f with all entries, or with some if ctx ends. Entries that change during the call may be missing or come
// twice.
func (l *flows) each(ctx context.Context, f func(prog.FlowKey, prog.Flow)) error {
	var cursor ebpf.MapBatchCursor
	keys, values := make([]prog.FlowKey, batch), make([]prog.Flow, batch)
	for ctx.Err() == nil {
		n, err := l.table.BatchLookup(&cursor, keys, values, nil)
		for i := range n {
			f(keys[i], values[i])
		}
		switch {
		case errors.Is(err, ebpf.ErrKeyNotExist):
			return nil
		case errors.Is(err, unix.ENOSPC) && len(keys) < 1<<20: // a bucket has more entries
			keys, values = make([]prog.FlowKey, 2*len(keys)), make([]prog.Flow, 2*len(values))
		case err != nil:
			return fmt.Errorf("read the flows: %w", err)
		}
	}
	return nil
}

// sweep removes the flows that have ended or are idle, and returns the number of entries before.
func (l *flows) sweep() (entries int, _ error) {
	start, direct, counts := uptime(), false, map[lb.Scope]int{lb.ScopeInside: 0, lb.ScopeNode: 0}
	var failed error
	err := l.each(context.Background(), func(k prog.FlowKey, v prog.Flow) {
		entries++
		counts[scope(v)]++
		direct = direct || isDirect(k, v)
		if int32(start-v.Seen) > int32(least(k.Proto, v.Flags)) {
			failed = errors.Join(failed, l.expire(k, v))
		}
	})
	if err = errors.Join(err, failed); err != nil {
		return entries, err
	}
	l.counts.Store(&counts)
	if err := l.outside.Put(uint32(0), uint32(counts[lb.ScopeNode])); err != nil || direct {
		return entries, err
	}
	var used uint32
	if err := l.direct.Lookup(uint32(0), &used); err != nil || used == 0 || used >= start {
		return entries, err
	}
	return entries, l.direct.Put(uint32(0), uint32(0))
}

// scope returns who opened a flow.
func scope(v prog.Flow) lb.Scope {
	if v.Flags&prog.FromOutside != 0 {
		return lb.ScopeNode
	}
	return lb.ScopeInside
}

// expire removes a flow if both of its sides have been idle for long enough. An entry that no other refers to belonged
// to an earlier flow of the same client.
func (l *flows) expire(k prog.FlowKey, v prog.Flow) error {
	var o, now prog.Flow
	pair, err := other(k, v), l.table.Lookup(other(k, v), &o)
	switch {
	case errors.Is(err, ebpf.ErrKeyNotExist) || err == nil && other(pair, o) != k:
		return l.delete(k)
	case err != nil:
		return fmt.Errorf("read a flow: %w", err)
	case int32(uptime()-max(v.Seen, o.Seen)) <= int32(idle(k.Proto, v.Flags, o.Flags)):
		return nil
	}
	// Another flow may have replaced it, or a packet refreshed it, since it was read.
	if l.table.Lookup(k, &now) != nil || now != v {
		return nil
	}
	return errors.Join(l.delete(k), l.delete(pair))
}

func (l *flows) delete(k prog.FlowKey) error {
	if err := ignoreMissing(l.table.Delete(k)); err != nil {
		return fmt.Errorf("remove a flow: %w", err)
	}
	return nil
}

// least returns the seconds for which an entry stays at least, whatever the other side has done.
func least(proto, flags uint8) uint32 {
	return min(idle(proto, flags, 0), idle(proto, flags, prog.Seen|prog.Confirmed), idle(proto, flags, prog.FIN))
}

// idle returns the seconds after which a flow ends.
func idle(proto, a, b uint8) uint32 {
	if proto == uint8(lb.UDP) {
		if a&b&prog.Seen != 0 && (a|b)&prog.Confirmed != 0 {
			return idleUDP
		}
		return idleShort
	}
	switch state(proto, a, b) {
	case lb.FlowClosed:
		return idleClosed
	case lb.FlowClosing:
		return idleHalfClosed
	case lb.FlowHalfOpen:
		return idleHalfOpen
	}
	return idleEstablished
}

// state returns the state of a flow with these flags of both sides.
func state(proto, a, b uint8) lb.FlowState {
	switch {
	case proto == uint8(lb.UDP):
		return lb.FlowEstablished
	case (a|b)&prog.RST != 0 || a&b&prog.FIN != 0:
		return lb.FlowClosed
	case (a|b)&prog.FIN != 0:
		return lb.FlowClosing
	case (a|b)&prog.Confirmed == 0: // a forged SYN gets an answer, but the client never sends more
		return lb.FlowHalfOpen
	}
	return lb.FlowEstablished
}

// leave ends the flows of endpoints that left a UDP port, so that their clients get another one with the next datagram.
// The entries for replies stay until they are idle, because answers may be on the way.
func (l *flows) leave(all []gone) error {
	if len(all) == 0 {
		return nil
	}
	type port struct {
		addr  prog.Addr
		port  uint16
		proto uint8
	}
	left := map[prog.Endpoint]map[port]bool{}
	for _, g := range all {
		e := toEndpoint(g.endpoint)
		if left[e] == nil {
			left[e] = map[port]bool{}
		}
		left[e][port{g.key.Addr, g.key.Port, g.key.Proto}] = true
	}
	any4, any6 := toAddr(netip.IPv4Unspecified()), toAddr(netip.IPv6Unspecified())
	var failed error
	err := l.each(context.Background(), func(k prog.FlowKey, v prog.Flow) {
		from := left[prog.Endpoint{Addr: v.To.Dst, Port: v.To.Dport}]
		if from[port{k.T.Dst, k.T.Dport, k.Proto}] || from[port{any4, k.T.Dport, k.Proto}] ||
			from[port{any6, k.T.Dport, k.Proto}] {
			failed = errors.Join(failed, l.delete(k))
		}
	})
	return errors.Join(err, failed)
}

// serving is the endpoints of each port, whatever the client.
type serving map[prog.ServiceKey]map[prog.Endpoint]bool

func newServing(rules map[prog.ServiceKey]*entry) serving {
	s := serving{}
	for k, e := range rules {
		k.Scope = 0
		if s[k] == nil {
			s[k] = map[prog.Endpoint]bool{}
		}
		for _, at := range slices.Concat(e.endpoints, e.serving) {
			s[k][toEndpoint(at)] = true
		}
	}
	return s
}

// has reports whether there is a rule for a port, which may be a node port, and whether an endpoint serves it.
func (s serving) has(to prog.Endpoint, proto uint8, endpoint prog.Endpoint) (known, serves bool) {
	for _, k := range portKeys(to, proto) {
		endpoints, has := s[k]
		known, serves = known || has, serves || endpoints[endpoint]
	}
	return known, serves
}

// portKeys returns the keys, without a scope, under which there may be a rule for a port.
func portKeys(to prog.Endpoint, proto uint8) (keys []prog.ServiceKey) {
	for _, addr := range []prog.Addr{to.Addr, toAddr(netip.IPv4Unspecified()), toAddr(netip.IPv6Unspecified())} {
		keys = append(keys, prog.ServiceKey{Addr: addr, Port: to.Port, Proto: proto})
	}
	return keys
}

// other returns the key of the other direction.
func other(k prog.FlowKey, v prog.Flow) prog.FlowKey {
	return prog.FlowKey{
		T:     prog.Tuple{Src: v.To.Dst, Dst: v.To.Src, Sport: v.To.Dport, Dport: v.To.Sport},
		Proto: k.Proto, Place: v.Other,
	}
}

// uptime returns the time of the programs' clock in seconds.
func uptime() uint32 {
	var t unix.Timespec
	if err := unix.ClockGettime(unix.CLOCK_MONOTONIC_COARSE, &t); err != nil {
		panic("inside: no monotonic clock: " + err.Error())
	}
	return uint32(time.Duration(t.Nano()) / time.Second)
}
