package kube

import (
	"context"
	"errors"
	"net"
	"net/netip"
	"net/url"
	"reflect"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"

	core "k8s.io/api/core/v1"

	"github.com/steelyard-lb/steelyard/lb"
)

// conditions decides whether the addresses of a service may be announced from this node.
type conditions struct {
	o       Options
	changed func(service string) // or everything

	mu      sync.Mutex           // guards all below
	probing Probing              // in force
	checks  map[string]lb.Check  // running ones, by service; proxyCheck is that of the service proxy
	results map[string]lb.Health // by service, of running checks only
	// proxyListens is set once the service proxy has answered a probe, and proxyAbsent while none has, once one was
	// refused.
	proxyListens, proxyAbsent bool
}

// proxyCheck is the key of the service proxy's check; no service has this name.
const proxyCheck = "node/proxy"

func newConditions(o Options, changed func(string)) *conditions {
	return &conditions{
		o: o, changed: changed, probing: o.probing(), checks: map[string]lb.Check{}, results: map[string]lb.Health{},
	}
}

// now returns the probing in force.
func (c *conditions) now() Probing {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.probing
}

// setProbing puts another probing in force for the service proxies. The checks of health check node ports follow when
// their services are reconciled. A check of the same target keeps its result; another target withholds nothing before
// it has failed, if the one before did not.
func (c *conditions) setProbing(p Probing) {
	works := c.proxyReason() == ""
	c.mu.Lock()
	c.probing = p
	c.mu.Unlock()
	if !c.startProxyCheck(works) {
		c.stop(proxyCheck)
		c.ask(nil)
	}
}

// withhold returns why the addresses of a service must not be announced from this node; "": they may.
func (c *conditions) withhold(s *core.Service, v *view, node *core.Node) string {
	if reason := c.excluded(node); reason != "" {
		return reason
	}
	if v.noEndpoint {
		c.stop(v.service.Name)
		return lb.NoEndpoint
	}
	if isLocal(s) && !v.spread {
		if v.readyLocal == 0 {
			c.stop(v.service.Name)
			return lb.NoLocalEndpoint
		}
		if s.Spec.HealthCheckNodePort != 0 {
			return c.nodePorts(s, v, node)
		}
	}
	c.stop(v.service.Name)
	return c.proxyReason()
}

// labelExclude excludes a node from every load balancer outside the cluster, unless its value parses as false
// (k8s.io/cloud-provider, nodeIncludedPredicate).
const labelExclude = core.LabelNodeExcludeBalancers

// taintAutoscaler marks nodes that the cluster autoscaler is about to remove (pkg/proxy/node.go).
const taintAutoscaler = "ToBeDeletedByClusterAutoscaler"

// excluded returns why this node announces nothing; "": it does.
func (c *conditions) excluded(n *core.Node) string {
	if n == nil {
		return "this node is not known to the API server"
	}
	if !c.o.IgnoreExclude && hasExcludeLabel(n) {
		return "the node has the label " + labelExclude
	}
	if c.o.Unschedulable && n.Spec.Unschedulable {
		return "the node is cordoned"
	}
	if c.o.NotReady && !slices.ContainsFunc(n.Status.Conditions, func(c core.NodeCondition) bool {
		return c.Type == core.NodeReady && c.Status == core.ConditionTrue
	}) {
		return "the node is not ready"
	}
	return removal(n)
}

// hasExcludeLabel reports whether a node has the label that excludes it.
func hasExcludeLabel(n *core.Node) bool {
	value, ok := n.Labels[labelExclude]
	b, err := strconv.ParseBool(value)
	return ok && (err != nil || b)
}

// removal returns why a node is about to be removed; "": it is not.
func removal(n *core.Node) string {
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

// startProxyCheck starts the check of the service proxy, if its health endpoint is configured.
func (c *conditions) startProxyCheck(presumed bool) bool {
	p := c.now()
	u, err := url.Parse(p.ProxyHealthz)
	if p.ProxyHealthz == "" || err != nil {
		return false
	}
	target, err := netip.ParseAddrPort(u.Host)
	if err != nil {
		const reason = "its host is not an address and a port"
		c.o.Log.Warn("service proxy not checked", "url", p.ProxyHealthz, "reason", reason)
		return false
	}
	check := lb.Check{
		Key: lb.CheckKey{Service: proxyCheck}, Target: target, Spec: p.Probe, Presumed: presumed,
		ByRoot: true, // the port is one at which every user can listen
	}
	check.Spec.Type, check.Spec.Path = lb.CheckHTTP, u.RequestURI()
	check.Spec.Status = []lb.StatusRange{{From: 200, To: 200}}
	c.start(check)
	return true
}

// proxyReason withholds the addresses when the service proxy is not healthy. A proxy that has never listened at its
// health endpoint is an old one or another product, and does not count.
func (c *conditions) proxyReason() string {
	if c.noProxy() {
		return ""
	}
	return c.reason(proxyCheck, "the service proxy's "+c.now().ProxyHealthz)
}

// noProxy reports whether the service proxy is not checked, or nothing has ever listened at its health endpoint.
func (c *conditions) noProxy() bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	_, checked := c.checks[proxyCheck]
	return !checked || c.proxyAbsent
}

// refused reports whether nothing listens at the target of a check.
func refused(h lb.Health) bool {
	return h.State == lb.StateUnhealthy && errors.Is(h.Err, syscall.ECONNREFUSED)
}

// timedOut reports whether a probe had no answer in time: nothing may listen there.
func timedOut(h lb.Health) bool {
	var e net.Error
	return h.State == lb.StateUnhealthy &&
		(errors.Is(h.Err, context.DeadlineExceeded) || errors.As(h.Err, &e) && e.Timeout())
}

// start starts a check unless it runs. A changed target discards the result. Until its first result, a presumed check
// has that of a healthy one.
func (c *conditions) start(check lb.Check) {
	key := check.Key.Service
	c.mu.Lock()
	old, known := c.checks[key]
	moved := known && old.Target != check.Target
	switch {
	case known && !moved:
		check.Presumed = old.Presumed
	case check.Presumed:
		c.results[key] = lb.Health{Key: check.Key, State: lb.StateHealthy}
	default:
		delete(c.results, key)
	}
	c.checks[key] = check
	if moved && key == proxyCheck {
		c.proxyAbsent = false
	}
	c.mu.Unlock()
	if moved {
		c.o.Prober.Put(key, nil) // or it would keep its state and report nothing until that changes
	}
	if !known || !reflect.DeepEqual(old, check) {
		c.o.Prober.Put(key, []lb.Check{check})
	}
}

// stop ends the checks of a service and discards their results.
func (c *conditions) stop(service string) {
	c.stopOne(service)
	c.stopOne(service + ofIPv6)
}

func (c *conditions) stopOne(key string) {
	c.mu.Lock()
	_, known := c.checks[key]
	delete(c.checks, key)
	delete(c.results, key)
	c.mu.Unlock()
	if known {
		c.o.Prober.Put(key, nil)
	}
}

// reason returns why the check under this key withholds addresses; "": it is healthy. What names its target.
func (c *conditions) reason(key, what string) string {
	c.mu.Lock()
	defer c.mu.Unlock()
	h, known := c.results[key]
	switch {
	case !known:
		return what + " has not answered yet"
	case h.State == lb.StateHealthy:
		return ""
	}
	return what + ": " + h.Reason
}

// health records the result of a check and triggers the reconciliation of the services that depend on it.
func (c *conditions) health(h lb.Health) {
	if h.State == lb.StateUnknown {
		return // a failure that does not yet decide
	}
	key := h.Key.Service
	c.mu.Lock()
	if _, running := c.checks[key]; !running {
		c.mu.Unlock()
		return
	}
	same := c.results[key].State == h.State
	c.results[key] = h
	healthz := c.probing.ProxyHealthz
	warn := key == proxyCheck && !c.proxyListens && refused(h)
	switch {
	case warn:
		c.proxyAbsent = true
	case key == proxyCheck && !refused(h) && !timedOut(h):
		c.proxyListens, c.proxyAbsent = true, false
	}
	c.mu.Unlock()
	if warn {
		c.o.Log.Warn("service proxy does not listen at its health endpoint; its health is ignored",
			"url", healthz, "reason", h.Reason, "fix", "set probe.proxy_healthz, or use a proxy that has one")
	}
	isOther := strings.HasPrefix(key, proxyCheck+"/")
	if isOther && same {
		return
	}
	if key == proxyCheck && h.State == lb.StateHealthy {
		c.ask(nil)
	}
	if key == proxyCheck || isOther {
		key = everything
	}
	c.changed(strings.TrimSuffix(key, ofIPv6))
}
