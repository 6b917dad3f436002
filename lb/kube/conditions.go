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
	"time"

	core "k8s.io/api/core/v1"

	"github.com/steelyard-lb/steelyard/lb"
)

// conditions decides whether the addresses of a service may be announced from this node.
type conditions struct {
	o       Options
	changed func(service string) // the service may also be everything

	mu      sync.Mutex           // guards all below
	probing Probing              // active settings
	checks  map[string]lb.Check  // running checks by service; the service proxy's is under proxyCheck
	results map[string]lb.Health // by service, only for running checks
	// proxyListens is set once the service proxy has answered a probe. proxyAbsent is set once a probe was refused,
	// until one is answered.
	proxyListens, proxyAbsent bool
}

// proxyCheck is the key of the service proxy's check; no service has this name.
const proxyCheck = "node/proxy"

func newConditions(o Options, changed func(string)) *conditions {
	return &conditions{
		o: o, changed: changed, probing: o.probing(), checks: map[string]lb.Check{}, results: map[string]lb.Health{},
	}
}

// Probing holds the Options of the same names.
type Probing struct {
	Probe        lb.CheckSpec
	ProxyHealthz string
	KeepLast     bool
	Hold         time.Duration
}

func (o Options) probing() Probing { return Probing{o.Probe, o.ProxyHealthz, o.KeepLast, o.Hold} }

// SetProbing replaces the Options in p. It may be called from any goroutine.
func (s *Source) SetProbing(p Probing) {
	s.newProbing.Store(&p)
	s.queue.Add(otherProbing)
}

// now returns the active probing settings.
func (c *conditions) now() Probing {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.probing
}

// setProbing applies new settings to the checks of service proxies. The checks of health check node ports follow when
// their services are reconciled. A check with the same target keeps its result. A new target withholds nothing until it
// has failed, unless the previous one did.
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

// withhold says why this node must not announce the addresses of a service, or returns "" if it may.
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
		if s.Spec.HealthCheckNodePort != 0 && !v.kept { // the service proxy has no endpoint
			return c.nodePorts(s, v, node)
		}
	}
	c.stop(v.service.Name)
	return c.proxyReason()
}

// labelExclude excludes a node from all external load balancers, unless its value parses as false
// (k8s.io/cloud-provider, nodeIncludedPredicate).
const labelExclude = core.LabelNodeExcludeBalancers

// taintAutoscaler marks nodes that the cluster autoscaler is about to remove (pkg/proxy/node.go).
const taintAutoscaler = "ToBeDeletedByClusterAutoscaler"

// excluded says why this node announces nothing, or returns "" if it does.
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

// hasExcludeLabel reports whether a node's label excludes it.
func hasExcludeLabel(n *core.Node) bool {
	value, ok := n.Labels[labelExclude]
	b, err := strconv.ParseBool(value)
	return ok && (err != nil || b)
}

// removal says why a node is about to be removed, or returns "" if it is not.
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
		ByRoot: true, // every user can listen on this port
	}
	check.Spec.Type, check.Spec.Path = lb.CheckHTTP, u.RequestURI()
	check.Spec.Status = []lb.StatusRange{{From: 200, To: 200}}
	c.start(check)
	return true
}

// proxyReason says why the service proxy's health withholds the addresses, or returns "". A proxy that has never
// listened at its health endpoint, such as an old version or another product, does not count.
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

// timedOut reports whether a probe timed out. Possibly nothing listens there.
func timedOut(h lb.Health) bool {
	var e net.Error
	return h.State == lb.StateUnhealthy &&
		(errors.Is(h.Err, context.DeadlineExceeded) || errors.As(h.Err, &e) && e.Timeout())
}

// start starts a check unless it is running. A changed target discards the result. A presumed check counts as healthy
// until its first result.
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
		c.o.Prober.Put(key, nil) // otherwise the check keeps its state and reports nothing until that changes
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

// reason says why the check under this key withholds addresses, or returns "" if it is healthy. what names its target.
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

// health records a check result and triggers reconciliation of the services that depend on it.
func (c *conditions) health(h lb.Health) {
	if h.State == lb.StateUnknown {
		return // a failure that is not conclusive yet
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
			"url", healthz, "reason", h.Reason, "fix", "set probe.proxy_healthz, or use a proxy with a health endpoint")
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
