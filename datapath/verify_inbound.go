package datapath

import (
	"fmt"
	"net/netip"
	"slices"

	"github.com/steelyard-lb/steelyard/datapath/internal/bpf"
	"github.com/steelyard-lb/steelyard/lb"
)

// This file verifies what this node does with packets that other nodes send here through tunnels. Their announcements,
// and those of this node, cannot depend on it: the other nodes select this one from the same table. So what is wrong is
// a warning.

const inboundWarning = "packets that other nodes send here do not get to their backends: "

// inbound is the delivery of packets of one frontend that other nodes send here.
type inbound struct {
	here    subject
	self    netip.Addr // the address of this node to which other nodes send
	senders []lb.Node
}

// inbound returns what this node should do with decapsulated packets of a frontend; false when none is sent here.
func (s *services) inbound(f lb.Frontend) (in inbound, ok bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	here := s.frontends[f]
	f.Decap = false
	from := s.frontends[f]
	if here == nil || here.plan == nil || !here.up || from == nil || from.plan == nil {
		return in, false
	}
	i := slices.IndexFunc(from.plan.Targets, func(t lb.Target) bool { return t.Local })
	if i < 0 {
		return in, false
	}
	in.self = from.plan.Targets[i].Addr.Addr()
	in.here, in.senders = subject{here.plan, here.backends}, from.plan.Nodes
	return in, true
}

// inboundFault returns why packets that other nodes send here are not delivered; "": they are.
func (v *verifier) inboundFault(f lb.Frontend) string {
	in, ok := v.d.services.inbound(f)
	if !ok {
		return ""
	}
	if !v.view.own[in.self] {
		return fmt.Sprintf("%s, to which other nodes send, is no address of this node", in.self)
	}
	for _, n := range in.senders {
		if n.Addr == in.self || n.Addr.Is4() != in.self.Is4() {
			continue
		}
		from, to := netip.AddrPortFrom(n.Addr, anyPort()), netip.AddrPortFrom(in.self, v.d.o.TunnelPort)
		x, ok := v.run(opening(lb.Question{Client: from, To: to, Protocol: lb.UDP}))
		if ok && v.d.actions[x.V.Action] != "decap" {
			reason := v.d.reasons[x.V.Reason]
			return fmt.Sprintf("tunnel packets from %s are not accepted: %s: %s", n.Addr, reason, meaning(reason))
		}
		break
	}
	return v.deliveryFault(f, in.here)
}

// explainDecap is EXPLAIN_DECAP of bpf/explain.h, and its place in a frame.
const explainDecap, sourceMAC = 0xff, 6

// deliveryFault returns why decapsulated packets are not delivered, and replies not returned; "": they are.
func (v *verifier) deliveryFault(f lb.Frontend, s subject) string {
	decapsulated := func(q lb.Question) []byte {
		frame := opening(q)
		frame[sourceMAC] = explainDecap
		return frame
	}
	return v.faultOfMade(f, s, decapsulated, func(bpf.Explained) bool { return false })
}
