package verify

import (
	"fmt"
	"math/rand/v2"
	"net/netip"
	"slices"
	"time"

	"github.com/steelyard-lb/steelyard/datapath/internal/bpf"
	"github.com/steelyard-lb/steelyard/datapath/internal/hook"
	"github.com/steelyard-lb/steelyard/datapath/internal/route"
	"github.com/steelyard-lb/steelyard/datapath/internal/table"
	"github.com/steelyard-lb/steelyard/lb"
)

// toBackends holds the interfaces and routers towards backends on other nodes.
type toBackends struct {
	since      time.Time // Routes.Since when they were read, so that they expire with the routes
	interfaces []int
	routers    []route.Router
}

// toBackends returns the interfaces and routers towards the backends of all frontends.
func (v *Verifier) toBackends() *toBackends {
	if v.backends == nil || v.backends.since != v.Routes.Since {
		v.backends = &toBackends{v.Routes.Since, v.Services.Interfaces(nil), v.Services.Routers()}
	}
	return v.backends
}

// Needed returns the indexes of the interfaces towards backends and Options.Reach. With Options.FollowRoutes it adds
// those towards clients behind routers.
func (o Options) Needed(routes *route.Cache, toBackends []int) []int {
	indexes, reach := slices.Clone(toBackends), o.Reach
	if o.FollowRoutes {
		for _, far := range []route.FarAddrs{route.Far4, route.Far6} {
			if a, n := routes.Widest(far.All()); n > 0 {
				reach = append(slices.Clip(reach), a)
			}
		}
	}
	for _, a := range reach {
		if a.IsLinkLocalUnicast() {
			continue // the address does not determine the interface
		}
		found, err := routes.Ask(route.Question{To: a})
		if err == nil && len(found) > 0 && found[0].LinkIndex > route.LoopbackIndex {
			indexes = append(indexes, found[0].LinkIndex)
		}
	}
	return indexes
}

// view is a snapshot of interfaces and addresses.
type view struct {
	hook.View
	own map[netip.Addr]bool // this node's addresses
}

// MadeTries is how many flows of a frontend are tried until one would be answered. A fault of one backend, or of one of
// several paths, is not a reason to withdraw an address. The flows' ports are among madePorts ports, because some flows
// may already be known.
const MadeTries, madePorts = 16, 64

// Fault returns why a frontend's flows are not answered, or "" if they are.
func (v *Verifier) Fault(f lb.Frontend, s table.Subject) string {
	return v.faultOfMade(f, s, opening, func(x bpf.Explained) bool {
		v.Failed[triedBackend{x.V.Backend, f.VIP.Is4()}]++
		return v.allFailed(f, s)
	})
}

// faultOfMade returns why none of MadeTries new flows is answered, or "" if one is or this is not known. frame builds
// the first packet of a flow; enough reports after each failure whether to stop trying. Known flows are skipped,
// because their result proves nothing: forged packets may have opened them, to any backend that the frontend once had.
func (v *Verifier) faultOfMade(
	f lb.Frontend, s table.Subject, frame func(lb.Question) []byte, enough func(bpf.Explained) bool,
) (fault string) {
	first, ok := v.question(f, s)
	if !ok {
		return ""
	}
	tries := 0
	for i := range uint16(madePorts) {
		q := first
		q.Client = netip.AddrPortFrom(first.Client.Addr(), first.Client.Port()+i)
		x, ok := v.run(frame(q))
		if !ok {
			return ""
		}
		if v.Names.Actions[x.V.Action] == "forward" && v.isOfKnownFlow(x.V) {
			continue
		}
		if fault = v.faultOf(q, s, x); fault == "" {
			return ""
		}
		if tries++; tries == MadeTries || enough(x) {
			return fault
		}
	}
	return ""
}

// question describes a synthetic packet that opens a flow of a frontend. It returns false if no client may.
func (v *Verifier) question(f lb.Frontend, s table.Subject) (lb.Question, bool) {
	client, ok := v.Clients.Of(f.VIP, s.Plan.Allow)
	from, to := netip.AddrPortFrom(client, AnyPort()), netip.AddrPortFrom(f.VIP, f.Port)
	return lb.Question{Client: from, To: to, Protocol: f.Protocol}, ok
}

// triedBackend is a backend and the address family of its clients.
type triedBackend struct {
	backend uint32
	v4      bool
}

// wayTries is the number of failures of a backend per round after which other frontends do not try it. If nothing
// works, a round must not take much longer than if everything does.
const wayTries = 4

func (v *Verifier) allFailed(f lb.Frontend, s table.Subject) bool {
	for _, id := range s.Backends {
		if v.Failed[triedBackend{id, f.VIP.Is4()}] < wayTries {
			return false
		}
	}
	return len(s.Backends) > 0
}

// AnyPort returns a random port for a synthetic client, the first of madePorts ports. An attacker who wants to open
// these flows with forged packets would have to use all ports.
func AnyPort() uint16 { return uint16(1024 + rand.IntN(64000-madePorts)) }

// tolerated lists reasons for dropping a synthetic packet that are not a fault of this node.
var tolerated = []string{
	"not_allowed", "source_is_local", "flows_full", "snat_exhausted", "udp_share_full", "icmp_ratelimited", "too_big",
}

// faultOf returns why a client receives no answer, given the result for its first packet, or "" if it receives one.
func (v *Verifier) faultOf(q lb.Question, s table.Subject, x bpf.Explained) string {
	reasons, local, nat := v.Names.Reasons, x.V.Local == 1, x.V.Method == uint8(bpf.MethodNAT)
	reason, to, from := reasons[x.V.Reason], bpf.FromAddr(x.V.T.Dst), bpf.FromAddr(x.V.T.Src)
	sent := v.Names.Actions[x.V.Action] == "forward"
	switch {
	case !sent && slices.Contains(tolerated, reason):
		return ""
	case !sent && reason == noRoute:
		return v.noWay(x, "forwarded")
	case !sent:
		return fmt.Sprintf("packets are not forwarded: %s: %s", reason, v.Meaning(reason))
	case x.V.Counted == 2 && !slices.Contains(s.Backends, x.V.Backend):
		return fmt.Sprintf("packets are sent to %s, which is not a backend", to)
	case reasons[x.Route] == noRoute:
		return v.noWay(x, "delivered")
	case reasons[x.Route] != forwarded:
		return fmt.Sprintf("packets are not delivered: %s: %s", reasons[x.Route], v.Meaning(reasons[x.Route]))
	case !local && !v.view.Links[int(x.Ifindex)].Running:
		return fmt.Sprintf(leadsDown, v.view.Name(x.Ifindex), to)
	case !local && nat && !v.view.Attached[int(x.Ifindex)]:
		return fmt.Sprintf("replies of %s arrive on %s, to which no program is attached", to, v.view.Name(x.Ifindex))
	case !local && from != q.Client.Addr() && from.IsGlobalUnicast() && !v.view.own[from] && !s.Direct():
		return fmt.Sprintf("%s, the source of packets to %s, is not an address of this node", from, to)
	}
	if fault := v.wayFault(q, x); fault != "" {
		return fault
	}
	return v.replyFault(q, x, local)
}

// replyFault returns why a server's answer does not reach the client, or "" if it does.
func (v *Verifier) replyFault(q lb.Question, x bpf.Explained, local bool) string {
	switch reply := v.Names.Reasons[x.Reply]; {
	case reply == "none":
		return ""
	case reply == noRoute:
		return v.noReplyWay(q.Client.Addr())
	case reply != forwarded:
		return fmt.Sprintf("replies are dropped: %s: %s", reply, v.Meaning(reply))
	case !v.view.Links[int(x.ReplyIfindex)].Running:
		return fmt.Sprintf(leadsDown, v.view.Name(x.ReplyIfindex), "clients")
	case local && !v.view.Attached[int(x.ReplyIfindex)]:
		return fmt.Sprintf("replies leave by %s, to which no program is attached", v.view.Name(x.ReplyIfindex))
	case x.ReplyVia != 0 && !v.view.Links[int(x.ReplyVia)].Running:
		return fmt.Sprintf(leadsDown, v.view.Name(x.ReplyVia), "clients")
	}
	if a := q.Client.Addr(); a == v.Clients.v4 || a == v.Clients.v6 {
		v.Clients.nics[a.Is4()] = int(x.ReplyIfindex)
	}
	if v.view.Links[int(x.ReplyIfindex)].NoARP && !v.configuredHop(q.Client.Addr()) {
		return fmt.Sprintf("%s, which leads to clients, sends no ARP and NDP requests (NOARP): ip link set %s arp on",
			v.view.Name(x.ReplyIfindex), v.view.Name(x.ReplyIfindex))
	}
	return v.Routers.Fault(q.Client.Addr(), "of replies", &v.Routes)
}

const forwarded = "forwarded" // REASON_FORWARDED
