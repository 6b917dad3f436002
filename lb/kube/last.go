package kube

import (
	"maps"
	"net/netip"
	"net/url"
	"slices"
	"strings"
	"time"

	core "k8s.io/api/core/v1"

	"github.com/steelyard-lb/steelyard/lb"
)

// One bad object can break the service proxies of all nodes at the same time. If each node then withdrew its routes, no
// address would be announced, although the datapath does not need the proxies. So a node whose proxy fails probes other
// nodes' proxies directly, with the same request. It withdraws the route while another node that can announce the
// service has a healthy proxy. Otherwise it keeps announcing, with a lower preference than a healthy node. The nodes
// need not agree, because routers prefer healthy nodes.

// asked is how many other nodes are probed: the next ones by name. In a larger cluster they are a sample; routers
// prefer a healthy node outside it anyway.
const asked = 8

// lastAnnouncer turns a reason that concerns this whole node into a lower preference unless another node can announce
// the service.
func (s *Source) lastAnnouncer(service *core.Service, v *view, endpoints []*endpointSlice) {
	if !s.o.KeepLast || !s.conditions.proxyFails() {
		return
	}
	s.conditions.ask(s.othersToAsk())
	if v.service.WithholdReason == "" || v.service.WithholdIntended {
		return
	}
	var able map[string]bool // nil: every node
	if isLocal(service) && !v.spread {
		able = readyOn(endpoints)
	}
	if !s.conditions.anyHealthy(able) {
		v.service.LowerPreference, v.service.WithholdReason = v.service.WithholdReason, ""
	}
}

// hold keeps a service withheld for at least Options.Hold after a fault, so that a flapping proxy does not move traffic
// each time.
func (s *Source) hold(now *lb.Service) {
	old, at := s.put[now.Name], s.held[now.Name]
	switch {
	case now.WithholdReason != "":
		if at.IsZero() && old != nil && old.WithholdReason == "" && !now.WithholdIntended {
			s.held[now.Name] = time.Now()
		}
	case at.IsZero():
	case time.Since(at) < s.o.Hold:
		now.WithholdReason = "healthy again, and withheld for probe.hold, " + s.o.Hold.String()
		s.queue.AddAfter(now.Name, s.o.Hold-time.Since(at))
	default:
		delete(s.held, now.Name)
	}
}

// othersToAsk returns the addresses, by node name, of other nodes that may announce.
func (s *Source) othersToAsk() map[string]netip.Addr {
	all := map[string]netip.Addr{}
	for _, x := range s.nodes.List() {
		n := x.(*core.Node)
		if addrs := nodeAddresses(n); n.Name != s.o.Node && len(addrs) > 0 && s.conditions.excluded(n) == "" {
			all[n.Name] = addrs[0]
		}
	}
	names := slices.Sorted(maps.Keys(all))
	next, _ := slices.BinarySearch(names, s.o.Node)
	ask := map[string]netip.Addr{}
	for i := range min(asked, len(names)) {
		name := names[(next+i)%len(names)]
		ask[name] = all[name]
	}
	return ask
}

// readyOn returns the nodes that have a ready endpoint.
func readyOn(endpoints []*endpointSlice) map[string]bool {
	on := map[string]bool{}
	for _, s := range endpoints {
		for _, e := range s.endpoints {
			if e.node != "" && e.ready {
				on[e.node] = true
			}
		}
	}
	return on
}

// otherCheck is the key of the check of another node's proxy.
func otherCheck(node string) string { return proxyCheck + "/" + node }

// proxyFails reports whether this node's service proxy has failed its check.
func (c *conditions) proxyFails() bool {
	if c.noProxy() {
		return false
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.results[proxyCheck].State == lb.StateUnhealthy
}

// ask starts checks of these other nodes' proxies and ends all other such checks.
func (c *conditions) ask(nodes map[string]netip.Addr) {
	c.mu.Lock()
	var ended []string
	for key := range c.checks {
		if name, ok := strings.CutPrefix(key, proxyCheck+"/"); ok && !nodes[name].IsValid() {
			ended = append(ended, key)
		}
	}
	c.mu.Unlock()
	for _, key := range ended {
		c.stop(key)
	}
	p := c.now()
	u, err := url.Parse(p.ProxyHealthz)
	if err != nil {
		return
	}
	own, err := netip.ParseAddrPort(u.Host)
	if err != nil {
		return
	}
	for name, addr := range nodes {
		check := lb.Check{
			Key: lb.CheckKey{Service: otherCheck(name)}, Target: netip.AddrPortFrom(addr, own.Port()), Spec: p.Probe,
		}
		check.Spec.Type, check.Spec.Path = lb.CheckHTTP, u.RequestURI()
		check.Spec.Status = []lb.StatusRange{{From: 200, To: 200}}
		c.start(check)
	}
}

// anyHealthy reports whether the proxy of another node in able is healthy. A nil able means all nodes.
func (c *conditions) anyHealthy(able map[string]bool) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	for key, h := range c.results {
		name, isOther := strings.CutPrefix(key, proxyCheck+"/")
		if isOther && h.State == lb.StateHealthy && (able == nil || able[name]) {
			return true
		}
	}
	return false
}

// announced reports whether s, as sent to the engine, is announced without restrictions. s may be nil.
func announced(s *lb.Service) bool {
	return s != nil && s.WithholdReason == "" && s.LowerPreference == ""
}
