package inside

import (
	"cmp"
	"context"
	"math/bits"
	"net/netip"
	"slices"
	"strings"

	"github.com/steelyard-lb/steelyard/datapath/inside/internal/prog"
	"github.com/steelyard-lb/steelyard/lb"
)

// Flows lists flows. more is true if the filter's limit was reached or ctx ended first. It reads the table while
// packets change it, so it may miss flows that change during the call. TCP connections of this node's processes have no
// flow.
func (i *Inside) Flows(ctx context.Context, want lb.FlowFilter) (flows []lb.FlowStatus, more bool, err error) {
	now, anyState := uptime(), want
	anyState.State = ""
	walk, stop := context.WithCancel(ctx)
	defer stop()
	err = i.flows.each(walk, func(k prog.FlowKey, v prog.Flow) {
		if more || v.Flags&prog.Reply != 0 || isDirect(k, v) {
			return
		}
		s := lb.FlowStatus{
			Scope: scope(v), Service: i.serviceOf(k, v), Client: addrPort(k.T.Src, k.T.Sport),
			Address: fromAddr(k.T.Dst), Port: bits.ReverseBytes16(k.T.Dport),
			Protocol: lb.Protocol(k.Proto), Forward: lb.MethodNAT,
			Backend: addrPort(v.To.Dst, v.To.Dport),
		}
		if !anyState.Match(s) {
			return
		}
		if source := addrPort(v.To.Src, v.To.Sport); source != s.Client {
			s.Source = source
		}
		var reply prog.Flow // zero if the flow is being removed
		_ = i.flows.table.Lookup(other(k, v), &reply)
		s.State = state(k.Proto, v.Flags, reply.Flags)
		s.Idle = max(0, float64(int32(now-max(v.Seen, reply.Seen))))
		switch {
		case !want.Match(s):
		case want.Limit > 0 && len(flows) == want.Limit:
			more = true
			stop()
		default:
			flows = append(flows, s)
		}
	})
	return flows, more || ctx.Err() != nil, err
}

// Rules returns the rules that are in force, by name. They must not be changed.
func (i *Inside) Rules() (all []lb.NodeRule) {
	i.mu.Lock()
	defer i.mu.Unlock()
	for _, e := range i.services.at {
		if e.key.Scope == prog.Inside { // each rule has such an entry
			all = append(all, *e.rule)
		}
	}
	slices.SortFunc(all, func(a, b lb.NodeRule) int {
		return cmp.Or(cmp.Compare(a.Name, b.Name), a.Addr.Compare(b.Addr), cmp.Compare(a.Port, b.Port))
	})
	return all
}

// isDirect reports whether an entry belongs to a connection without a Service (in_direct).
func isDirect(k prog.FlowKey, v prog.Flow) bool {
	return k.T.Dst == v.To.Dst && k.T.Dport == v.To.Dport && v.Other == prog.Leaves
}

// serviceOf returns the name of a flow's Service, or "" if it was deleted.
func (i *Inside) serviceOf(k prog.FlowKey, v prog.Flow) string {
	i.mu.Lock()
	defer i.mu.Unlock()
	in := prog.Inside
	if scope(v) == lb.ScopeNode {
		in = prog.Outside
	}
	at := netip.AddrPortFrom(fromAddr(k.T.Dst), bits.ReverseBytes16(k.T.Dport))
	e := i.services.find(at, lb.Protocol(k.Proto), in, true)
	if e == nil {
		return ""
	}
	service, _, _ := strings.Cut(e.rule.Name, ":")
	return service
}

// find returns the entry for a destination. An address takes precedence over node ports, which only addresses of this
// node have (in_service_of).
func (s *services) find(to netip.AddrPort, proto lb.Protocol, scope uint8, own bool) *entry {
	k := prog.ServiceKey{
		Addr: toAddr(to.Addr()), Port: bits.ReverseBytes16(to.Port()), Proto: uint8(proto), Scope: scope,
	}
	e := s.at[k]
	if e == nil && own {
		k.Addr = toAddr(unspecified(to.Addr()))
		e = s.at[k]
	}
	return e
}

// unspecified returns the address that stands for all of this node's addresses of a's family.
func unspecified(a netip.Addr) netip.Addr {
	if a.Is4() {
		return netip.IPv4Unspecified()
	}
	return netip.IPv6Unspecified()
}

func addrPort(a prog.Addr, port uint16) netip.AddrPort {
	return netip.AddrPortFrom(fromAddr(a), bits.ReverseBytes16(port))
}
