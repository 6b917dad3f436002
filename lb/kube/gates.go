package kube

import (
	"errors"
	"fmt"
	"net/netip"
	"net/url"
	"slices"
	"strconv"
	"sync"
	"syscall"

	core "k8s.io/api/core/v1"

	"github.com/steelyard-lb/steelyard/lb"
)

// gates says whether the addresses of a service may be announced from this node.
type gates struct {
	o       Options
	changed func(service string) // or everything

	mu       sync.Mutex // guards all below
	asked    map[string]lb.Check
	verdicts map[string]lb.Health // by service; proxyGate is the service proxy
	answered bool                 // the proxy has answered at least once
}

// proxyGate is the name under which the service proxy's health is asked; no service is called so.
const proxyGate = "node/proxy"

func newGates(o Options, changed func(string)) *gates {
	return &gates{o: o, changed: changed, asked: map[string]lb.Check{}, verdicts: map[string]lb.Health{}}
}

// hold returns why the addresses of a service must not be announced from here; "": they may.
func (g *gates) hold(s *core.Service, v *view, node *core.Node) string {
	if reason := g.excluded(node); reason != "" {
		return reason
	}
	if isLocal(s) {
		if v.readyHere == 0 {
			g.forget(v.service.Name)
			return "externalTrafficPolicy is Local, and no ready endpoint is on this node"
		}
		if s.Spec.HealthCheckNodePort != 0 {
			return g.nodePort(v.service.Name, uint16(s.Spec.HealthCheckNodePort))
		}
	}
	g.forget(v.service.Name)
	return g.proxyHold()
}

// labelExclude takes a node out of every balancer outside the cluster; a value that says false does not (k8s.io/cloud-provider,
// nodeIncludedPredicate).
const labelExclude = core.LabelNodeExcludeBalancers

// taintAutoscaler is on nodes that are about to go (pkg/proxy/node.go).
const taintAutoscaler = "ToBeDeletedByClusterAutoscaler"

func (g *gates) excluded(n *core.Node) string {
	if n == nil {
		return "this node is not known to the API server"
	}
	if value, ok := n.Labels[labelExclude]; ok {
		if b, err := strconv.ParseBool(value); err != nil || b {
			return "the node has the label " + labelExclude
		}
	}
	if g.o.Unschedulable && n.Spec.Unschedulable {
		return "the node is cordoned"
	}
	if g.o.NotReady && !slices.ContainsFunc(n.Status.Conditions, func(c core.NodeCondition) bool {
		return c.Type == core.NodeReady && c.Status == core.ConditionTrue
	}) {
		return "the node is not ready"
	}
	return going(n)
}

// going returns how a node is about to go; "": it stays.
func going(n *core.Node) string {
	if n.DeletionTimestamp != nil {
		return "the node is being deleted"
	}
	for _, t := range n.Spec.Taints {
		if t.Key == taintAutoscaler {
			return "the node has the taint " + taintAutoscaler
		}
	}
	return ""
}

// nodePort asks a health check node port of this node as an outside balancer would.
func (g *gates) nodePort(service string, port uint16) string {
	c := lb.Check{Key: lb.CheckKey{Service: service}, Target: netip.AddrPortFrom(g.o.Address, port), Spec: g.o.Probe}
	c.Spec.Type, c.Spec.Path, c.Spec.Body = lb.CheckNodePort, "/healthz", service
	g.ask(c)
	return g.verdict(service, fmt.Sprintf("health check node port %d", port))
}

// proxy begins to ask the service proxy.
func (g *gates) proxy() {
	u, err := url.Parse(g.o.ProxyHealthz)
	if g.o.ProxyHealthz == "" || err != nil {
		return
	}
	at, err := netip.ParseAddrPort(u.Host)
	if err != nil {
		g.o.Log.Warn("the service proxy is not asked for its health", "url", g.o.ProxyHealthz, "reason", "its host is not an address and a port")
		return
	}
	c := lb.Check{Key: lb.CheckKey{Service: proxyGate}, Target: at, Spec: g.o.Probe}
	c.Spec.Type, c.Spec.Path, c.Spec.Status = lb.CheckHTTP, u.RequestURI(), []lb.StatusRange{{From: 200, To: 200}}
	g.ask(c)
}

// proxyHold says no when the service proxy does. One that has never listened is an old one, or of another make.
func (g *gates) proxyHold() string {
	if g.proxyless() {
		return ""
	}
	return g.verdict(proxyGate, "the service proxy's "+g.o.ProxyHealthz)
}

// proxyless reports whether nothing has ever listened where the service proxy's health is asked, or nothing is asked.
func (g *gates) proxyless() bool {
	g.mu.Lock()
	defer g.mu.Unlock()
	_, asked := g.asked[proxyGate]
	return !asked || !g.answered && refused(g.verdicts[proxyGate])
}

func refused(h lb.Health) bool {
	return h.State == lb.StateUnhealthy && errors.Is(h.Err, syscall.ECONNREFUSED)
}

// ask makes sure that a check runs.
func (g *gates) ask(c lb.Check) {
	g.mu.Lock()
	old, known := g.asked[c.Key.Service]
	same := known && old.Target == c.Target
	g.asked[c.Key.Service] = c
	if known && !same {
		delete(g.verdicts, c.Key.Service)
	}
	g.mu.Unlock()
	if !same {
		g.o.Prober.Put(c.Key.Service, []lb.Check{c})
	}
}

// forget ends the check of a service.
func (g *gates) forget(service string) {
	g.mu.Lock()
	_, known := g.asked[service]
	delete(g.asked, service)
	delete(g.verdicts, service)
	g.mu.Unlock()
	if known {
		g.o.Prober.Put(service, nil)
	}
}

func (g *gates) verdict(key, what string) string {
	g.mu.Lock()
	defer g.mu.Unlock()
	h, known := g.verdicts[key]
	switch {
	case !known:
		return what + " has not answered yet"
	case h.State == lb.StateHealthy:
		return ""
	}
	return what + ": " + h.Reason
}

func (g *gates) health(h lb.Health) {
	key := h.Key.Service
	g.mu.Lock()
	if _, asked := g.asked[key]; !asked {
		g.mu.Unlock()
		return
	}
	g.verdicts[key] = h
	warn := key == proxyGate && !g.answered && refused(h)
	g.answered = g.answered || key == proxyGate && !refused(h)
	g.mu.Unlock()
	if warn {
		g.o.Log.Warn("nothing listens at the service proxy's health endpoint; addresses are announced whether or not it works",
			"url", g.o.ProxyHealthz, "fix", "set probe.proxy_healthz, or use a proxy that has one")
	}
	if key == proxyGate {
		key = everything
	}
	g.changed(key)
}
