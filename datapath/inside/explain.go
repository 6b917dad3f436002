package inside

import (
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"

	"github.com/vishvananda/netlink"

	"github.com/steelyard-lb/steelyard/datapath/inside/internal/prog"
	"github.com/steelyard-lb/steelyard/lb"
)

// Explain returns what happens to the first packet of a connection. ok is false if the service proxy does not decide
// that: the packet is for none of its destinations. Explain sends no packet and changes nothing.
func (i *Inside) Explain(q lb.Question) (e lb.Explanation, ok bool, err error) {
	pods, findings := i.devices.toPods(q.Client.Addr()), i.Findings()
	i.mu.Lock()
	defer i.mu.Unlock()
	x := explanation{
		Explanation: lb.Explanation{
			Scope: lb.ScopeInside, Client: q.Client, Address: q.To.Addr(), Port: q.To.Port(), Protocol: q.Protocol,
		},
		to: fmt.Sprintf("%s/%s", q.To, q.Protocol),
	}
	kinds, cluster := i.kinds[q.To.Addr()], false
	if a := i.services.addrs[q.To.Addr()]; a != nil {
		cluster = a.cluster > 0
	}
	scope := prog.Inside
	switch {
	case i.own.addrs[q.Client.Addr()] || q.Client.Addr().IsLoopback():
		x.say("%s is this node", q.Client.Addr())
		x.node = true
	case pods != "":
		x.say("%s is behind interface %s, as a pod of this node", q.Client.Addr(), pods)
	default:
		scope, x.Scope = prog.Outside, lb.ScopeNode
		x.say("%s is neither this node nor one of its pods", q.Client.Addr())
	}
	r := i.services.find(q.To, q.Protocol, scope, kinds&prog.Own != 0)
	switch {
	case kinds == prog.Own|prog.Cluster:
		x.say("an interface of this node has the ClusterIP %s, so a process of the node gets the packet", x.Address)
		x.end("pass", "none")
	case scope == prog.Outside && cluster:
		x.say("%s is a ClusterIP, which other machines do not reach through this node", x.Address)
		x.end("drop", "not_allowed")
	case scope == prog.Outside && (r == nil || kinds&prog.Own == 0), r == nil && kinds&prog.Cluster == 0:
		return e, false, nil
	case r == nil && i.earlier != nil:
		return e, false, errors.New("the Services of the cluster are not known yet")
	case r == nil:
		x.say("no Service has %s", x.to)
		x.refuse("no_frontend")
	default:
		i.decide(&x, r)
	}
	for _, f := range findings {
		x.say("%s", f)
	}
	return x.Explanation, true, nil
}

// explanation is an Explanation in the making.
type explanation struct {
	lb.Explanation
	to   string
	node bool // the client is this node
}

func (x *explanation) say(format string, args ...any) {
	x.Steps = append(x.Steps, fmt.Sprintf(format, args...))
}

func (x *explanation) end(action, reason string) { x.Action, x.Reason = action, reason }

// refuse is verdict_refuse.
func (x *explanation) refuse(reason string) {
	if x.end("refuse", reason); x.Protocol == lb.TCP {
		x.Action = "reset"
	}
}

// decide adds what happens to a new connection to the destination of an entry (in_new). The caller holds i.mu.
func (i *Inside) decide(x *explanation, r *entry) {
	service, _, _ := strings.Cut(r.rule.Name, ":")
	x.Service = service
	x.say("%s is %s of %s", x.to, destination(r.rule), r.rule.Name)
	allows := func(p netip.Prefix) bool { return p.Contains(x.Client.Addr()) }
	switch {
	case i.kinds[x.Client.Addr()]&prog.Cluster != 0:
		x.say("the source is a Service's address")
		x.end("drop", "source_is_local")
		return
	case r.rule.Allow != nil && !slices.ContainsFunc(r.rule.Allow, allows):
		x.say("loadBalancerSourceRanges %v do not contain the source", r.rule.Allow)
		x.end("drop", "not_allowed")
		return
	}
	if r.rule.Allow != nil || i.o.NoSocketLB && i.kinds[x.Address]&(prog.Own|prog.Shared) == 0 {
		x.node = false // connect(2) does not know the source yet, or leaves the packets to be translated
	}
	if to, known := i.flows.find(x.Client, netip.AddrPortFrom(x.Address, x.Port), x.Protocol); known {
		x.say("the flow is known")
		x.forward([]netip.AddrPort{to})
		return
	}
	switch {
	case len(r.endpoints) > 0:
		x.forward(r.endpoints)
	case r.value.Drop != 0:
		x.say("this node has no endpoint, and the traffic policy permits no other; other nodes have some")
		x.end("drop", "no_local_backend")
	default:
		x.say("the Service has no endpoint")
		x.refuse("no_backend")
	}
	if x.Action == "forward" && r.rule.Affinity > 0 {
		x.say("a client gets the endpoint that it had within the last %s (affinity)", r.rule.Affinity)
	}
}

// forward adds the possible endpoints.
func (x *explanation) forward(to []netip.AddrPort) {
	x.end("forward", "forwarded")
	x.Forward, x.Endpoints = lb.MethodNAT, to
	if len(to) == 1 {
		x.Backend = to[0]
	}
	const shown = 10
	texts := make([]string, 0, shown+1)
	for _, at := range to[:min(len(to), shown)] {
		texts = append(texts, at.String())
	}
	if more := len(to) - shown; more > 0 {
		texts = append(texts, fmt.Sprintf("and %d more", more))
	}
	x.say("to one of %d endpoints: %s", len(to), strings.Join(texts, ", "))
	if x.node && x.Protocol == lb.TCP {
		x.say("connect(2) selects it, so the packets themselves are addressed to the endpoint")
	}
}

// destination says what a rule's address is.
func destination(r *lb.NodeRule) string {
	switch {
	case r.ClusterIP:
		return "a ClusterIP"
	case r.Addr.IsUnspecified():
		return "a node port"
	}
	return "an address"
}

// find returns the endpoint of a live flow.
func (l *flows) find(client, to netip.AddrPort, proto lb.Protocol) (endpoint netip.AddrPort, known bool) {
	from, at := toEndpoint(client), toEndpoint(to)
	k := prog.FlowKey{
		T:     prog.Tuple{Src: from.Addr, Dst: at.Addr, Sport: from.Port, Dport: at.Port},
		Proto: uint8(proto), Place: prog.Arrives,
	}
	var v, reply prog.Flow
	if l.table.Lookup(k, &v) != nil || l.table.Lookup(other(k, v), &reply) != nil ||
		state(k.Proto, v.Flags, reply.Flags) == lb.FlowClosed {
		return endpoint, false
	}
	return addrPort(v.To.Dst, v.To.Dport), true
}

// toPods returns the interface by which packets to an address leave if that leads to pods, or "".
func (d *devices) toPods(a netip.Addr) string {
	routes, err := netlink.RouteGet(a.AsSlice())
	if err != nil || len(routes) == 0 {
		return ""
	}
	index := routes[0].LinkIndex
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.states[index].kind == kindPod {
		return d.states[index].name
	}
	for _, e := range d.entries {
		if bridge := d.masters[index]; bridge != nil && e.Kind == prog.Pod && int(e.Bridge) == index {
			return bridge.Attrs().Name
		}
	}
	return ""
}
