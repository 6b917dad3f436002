package kube

import (
	"fmt"
	"strings"
	"testing"

	core "k8s.io/api/core/v1"
	meta "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/steelyard-lb/steelyard/lb"
	"github.com/steelyard-lb/steelyard/lb/lbtest/must"
)

// nodesPool returns a pool of the nodes' addresses.
func nodesPool(changes ...func(*Pool)) Pool {
	p := Pool{Nodes: true, Pool: lb.Pool{Name: "nodes", AutoAssign: true, Ranges: NodeRanges, ShareAcross: true}}
	for _, change := range changes {
		change(&p)
	}
	return p
}

// poolNodesOf returns nodes from descriptions like "n1 192.0.2.1 2001:db8::1" and "n2 192.0.2.2 away".
func poolNodesOf(texts ...string) (all []poolNode) {
	for _, text := range texts {
		f := strings.Fields(text)
		n := poolNode{name: f[0], ready: f[len(f)-1] != "away"}
		n.addrs = parsed(f[1:])
		all = append(all, n)
	}
	return all
}

// Which nodes' addresses a Service gets, by its families, policy and endpoints.
func TestNodesServe(t *testing.T) {
	t.Parallel()
	two := []string{"n1 192.0.2.1 2001:db8::1", "n2 192.0.2.2 2001:db8::2"}
	v6 := func(s *core.Service) { s.Spec.IPFamilies = []core.IPFamily{core.IPv6Protocol} }
	both := func(s *core.Service) { s.Spec.IPFamilies = []core.IPFamily{core.IPv6Protocol, core.IPv4Protocol} }
	for _, tt := range []struct {
		name   string
		nodes  []string
		change func(*core.Service)
		on     []string // the nodes with a ready endpoint
		want   string
	}{
		{"all", two, same, nil, "[192.0.2.1 192.0.2.2]"},
		{"IPv6", two, v6, nil, "[2001:db8::1 2001:db8::2]"},
		{"both families", two, both, nil, "[2001:db8::1 2001:db8::2 192.0.2.1 192.0.2.2]"},
		{"a family that no node has", []string{"n1 192.0.2.1"}, both, nil, "[192.0.2.1]"},
		{"one is not ready", []string{two[0], "n2 192.0.2.2 away"}, same, nil, "[192.0.2.1]"},
		{"none is ready", []string{"n1 192.0.2.1 away"}, same, nil, "[192.0.2.1]"},
		{"Local", two, local, []string{"n2"}, "[192.0.2.2]"},
		{"Local, no endpoint", two, local, nil, "[192.0.2.1 192.0.2.2]"},
		{"Local, the endpoint's node is not ready", []string{two[0], "n2 192.0.2.2 away"}, local, []string{"n2"},
			"[192.0.2.1]"},
		{"no node", []string{}, same, nil, "no node has an address"},
		{"no node of the family", []string{"n1 192.0.2.1"}, v6, nil, "no node has an address"},
		{"another pool is named", two, func(s *core.Service) {
			s.Annotations = map[string]string{wantPool[0]: "public"}
		}, nil, "[203.0.113.1]"},
	} {
		a := newAssigner(nil, []Pool{nodesPool(), poolOfOne("203.0.113.1", func(p *Pool) { p.Name = "public" })})
		a.poolNodes = append([]poolNode{}, poolNodesOf(tt.nodes...)...)
		a.readyOn = func(string) map[string]bool {
			on := map[string]bool{}
			for _, name := range tt.on {
				on[name] = true
			}
			return on
		}
		d := a.decide(wanting("web", tt.change), pending{}, false)
		got := fmt.Sprint(d.addrs)
		if d.warning != "" {
			got = d.warning
		}
		must.True(t, strings.HasPrefix(got, tt.want), "%s: got %s; want %s", tt.name, got, tt.want)
	}
}

// A node's ExternalIP is the address for clients; in a family without one, the InternalIP.
func TestAddressOfNodeForClients(t *testing.T) {
	t.Parallel()
	n := &core.Node{ObjectMeta: meta.ObjectMeta{Name: "n1"}}
	n.Status.Addresses = append(n.Status.Addresses, []core.NodeAddress{
		{Type: core.NodeInternalIP, Address: "10.0.0.1"}, {Type: core.NodeInternalIP, Address: "fd00::1"},
		{Type: core.NodeExternalIP, Address: "192.0.2.1"}, {Type: core.NodeHostName, Address: "192.0.2.9"},
	}...)
	slim(n)
	must.Row(t, "addresses", "[192.0.2.1 fd00::1]", fmt.Sprint(poolNodeOf(n).addrs))
	must.Row(t, "own", "[10.0.0.1 fd00::1 192.0.2.1]", fmt.Sprint(ownAddresses(n)))
}

// Services share the nodes' addresses by port, whatever their namespaces and keys. The second one that requests a port
// waits, says so, and gets the addresses when the first is deleted. Nodes come and go.
func TestNodesPorts(t *testing.T) {
	web, other := wanting("web", same), wanting("other", func(s *core.Service) {
		s.Namespace, s.Spec.Ports = "team", []core.ServicePort{{Port: 8443}}
	})
	second := wanting("second", func(s *core.Service) { s.Namespace, s.UID = "team", "second" })
	term, client, events := testTerm(t, web, other, second)
	term.assigner = newAssigner(nil, []Pool{nodesPool()})
	reconcile := func(s *core.Service) string {
		t.Helper()
		must.Do(t, term.reconcile(t.Context(), nameOf(s)))
		now := must.Get(client.CoreV1().Services(s.Namespace).Get(t.Context(), s.Name, meta.GetOptions{}))(t)
		now.ResourceVersion = fmt.Sprint(term.known[nameOf(s)].number) // the fake one does not count
		if isOurs(s) {
			setManager(now, fieldManager)
		}
		must.Do(t, term.services.Update(now))
		return fmt.Sprint(statusOf(now))
	}
	must.Row(t, "before the nodes are known", "[]", reconcile(web))
	must.Row(t, "Events", nil, drained(events))
	term.assigner.poolNodes = poolNodesOf("n1 192.0.2.1", "n2 192.0.2.2")
	must.Row(t, "the first", "[192.0.2.1 192.0.2.2]", reconcile(web))
	must.Row(t, "another port", "[192.0.2.1 192.0.2.2]", reconcile(other))
	drained(events)
	must.Row(t, "the same port", "[]", reconcile(second))
	must.Row(t, "Events", []string{"Warning PortInUse port 80/TCP of the nodes belongs to " + webName +
		"; the Service waits until it is free"}, drained(events))
	term.assigner.poolNodes = poolNodesOf("n1 192.0.2.1")
	must.Row(t, "a node goes", "[192.0.2.1]", reconcile(web))
	must.Row(t, "Events", []string{"Normal IPAllocated assigned [192.0.2.1]", "Warning AddressMoved 192.0.2.2 was " +
		"taken from the Service, which has 192.0.2.1 now: other nodes serve it"}, drained(events))
	must.Do(t, term.services.Delete(web))
	term.deleted(web)
	term.current(webName)
	must.Row(t, "the first is deleted", "[192.0.2.1]", reconcile(second))
}

// Another leader learns from the status who has which port.
func TestNodesPortsAfterElection(t *testing.T) {
	t.Parallel()
	a := newAssigner(nil, []Pool{nodesPool()})
	a.poolNodes = poolNodesOf("n1 192.0.2.1")
	has := func(ports ...int32) func(*core.Service) {
		return func(s *core.Service) {
			owning("192.0.2.1")(s)
			record := portsText(holder(s).Ports)
			s.Status.Conditions = []meta.Condition{{Type: conditionShared, Message: record}}
			for _, p := range ports {
				s.Spec.Ports = append(s.Spec.Ports, core.ServicePort{Name: fmt.Sprint(p), Port: p})
			}
		}
	}
	web := wanting("web", has())
	older := wanting("older", func(s *core.Service) {
		s.UID, s.Spec.Ports = "older", []core.ServicePort{{Port: 8443}}
		has(80)(s)
		s.CreationTimestamp = meta.Unix(1, 0)
	})
	a.adopt(older, pending{})
	a.adopt(web, pending{})
	d := a.decide(older, pending{}, false)
	must.Row(t, "reason", reasonPortInUse, d.reason)
	must.Row(t, "record", "8443/TCP", d.record)
	must.True(t, strings.HasPrefix(d.warning, "80/TCP at the nodes belongs to "+webName), "%s", d.warning)
	must.Row(t, "addresses", "[192.0.2.1]", fmt.Sprint(d.addrs))
}

// A node serves a Service at all of its own addresses of the Service's families, to its pods and to other machines. It
// leaves other nodes' addresses to them, and out the ports that are another Service's or used by the node.
func TestRulesAtNode(t *testing.T) {
	t.Parallel()
	node := parsed([]string{"10.0.0.1", "192.0.2.1", "fd00::1"})
	rules := func(pools []Pool, status ...string) (all []string) {
		s := aService(func(s *core.Service) {
			s.Spec.ClusterIPs, s.Status = []string{"10.96.0.1"}, core.ServiceStatus{}
			given(status...)(s)
		})
		for _, r := range rulesFor(s, nil, topology{node: "n1", own: node}, pools, &Options{MaxEndpoints: 100}) {
			if r.kind == ruleNode || r.kind == ruleVIP {
				all = append(all, fmt.Sprint(r.Addr, " ", r.Outside != nil, r.Whole))
			}
		}
		return all
	}
	own := []string{"10.0.0.1 true false", "192.0.2.1 true false"}
	must.Row(t, "at this node", own, rules([]Pool{nodesPool()}, "192.0.2.1", "192.0.2.2"))
	must.Row(t, "at another node", nil, rules([]Pool{nodesPool()}, "192.0.2.2"))
	must.Row(t, "beside another pool", append([]string{"203.0.113.1 true true"}, own...),
		rules([]Pool{nodesPool(), poolOfOne("203.0.113.1")}, "203.0.113.1", "192.0.2.1"))
	forOthers := nodesPool(func(p *Pool) { p.Namespaces = []string{"other"} })
	must.Row(t, "not for this Service", []string{"192.0.2.1 true false"}, rules([]Pool{forOthers}, "192.0.2.1"))
}
