package verify

import (
	"fmt"
	"net/netip"
	"slices"

	"golang.org/x/sys/unix"

	"github.com/steelyard-lb/steelyard/datapath/internal/bpf"
	"github.com/steelyard-lb/steelyard/datapath/internal/route"
	"github.com/steelyard-lb/steelyard/datapath/internal/table"
	"github.com/steelyard-lb/steelyard/lb"
)

// An interface that is set down loses its routes, and one that loses its carrier keeps them. Both are reported as the
// same fault.

const (
	noRoute   = "no_route"
	leadsDown = "%s, which leads to %s, is down"
)

// noWay returns why there is no route to a verdict's backend.
func (v *Verifier) noWay(x bpf.Explained, what string) string {
	way := v.Services.Way(x.V.Backend)
	if nic := way.Certain.NIC; nic != 0 && v.view.IsDown(nic) {
		return fmt.Sprintf(leadsDown, v.view.Name(uint32(nic)), way.At.Addr())
	}
	return fmt.Sprintf("packets are not %s: %s: %s%s", what, noRoute, v.Meaning(noRoute), v.view.Down())
}

// noReplyWay returns why there is no route to a client.
func (v *Verifier) noReplyWay(client netip.Addr) string {
	if nic := v.Clients.nics[client.Is4()]; v.view.IsDown(nic) {
		return fmt.Sprintf(leadsDown, v.view.Name(uint32(nic)), "clients")
	}
	return fmt.Sprintf("replies are dropped: %s: the kernel has no route to clients (%s)%s",
		noRoute, client, v.view.Down())
}

// configuredHop reports whether the MAC address of a router towards a client is configured statically.
func (v *Verifier) configuredHop(client netip.Addr) bool {
	entries := route.NewNeighbours(v.Routes.Kernel)
	return slices.ContainsFunc(v.Routes.NextHops(client), func(x route.Router) bool {
		n, _ := entries.Of(x)
		return n.State&unix.NUD_PERMANENT != 0
	})
}

// The rest of this file verifies what this node does with packets that other nodes send here through tunnels. Faults
// are only warnings. No node's announcements can depend on them, because all other nodes select this one from the same
// table.

const InboundWarning = "packets that other nodes send here do not reach their backends: "

// inboundFault returns why packets that other nodes send here are not delivered, or "" if they are.
func (v *Verifier) inboundFault(f lb.Frontend) string {
	in, ok := v.Services.Inbound(f)
	if !ok {
		return ""
	}
	if !v.view.own[in.Self] {
		return fmt.Sprintf("%s, to which other nodes send, is not an address of this node", in.Self)
	}
	for _, n := range in.Senders {
		if n.Addr == in.Self || n.Addr.Is4() != in.Self.Is4() {
			continue
		}
		from, to := netip.AddrPortFrom(n.Addr, AnyPort()), netip.AddrPortFrom(in.Self, v.o.TunnelPort)
		x, ok := v.run(opening(lb.Question{Client: from, To: to, Protocol: lb.UDP}))
		if ok && v.Names.Actions[x.V.Action] != "decap" {
			reason := v.Names.Reasons[x.V.Reason]
			return fmt.Sprintf("tunnel packets from %s are not accepted: %s: %s", n.Addr, reason, v.Meaning(reason))
		}
		break
	}
	return v.deliveryFault(f, in.Here)
}

// explainDecap is EXPLAIN_DECAP of bpf/explain.h, and sourceMAC is its offset in a frame.
const explainDecap, sourceMAC = 0xff, 6

// deliveryFault returns why decapsulated packets are not delivered or replies not returned, or "" if they are.
func (v *Verifier) deliveryFault(f lb.Frontend, s table.Subject) string {
	decapsulated := func(q lb.Question) []byte {
		frame := opening(q)
		frame[sourceMAC] = explainDecap
		return frame
	}
	return v.faultOfMade(f, s, decapsulated, func(bpf.Explained) bool { return false })
}
