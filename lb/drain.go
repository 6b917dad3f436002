package lb

import (
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strings"
	"time"
)

// Drains are what an operator has taken out of service. The VIPs of drained services, or of a drained node, are not
// announced unless another service also uses them. Packets that still arrive are forwarded. A drained backend keeps its
// connections and gets no new ones. Weights replace those of the configuration.
type Drains struct {
	Node     bool          `json:"node"` // every service
	Services []string      `json:"services"`
	Backends []DrainTarget `json:"backends,omitempty"`
	Weights  []SetWeight   `json:"weights,omitempty"`
}

// DrainTarget is a server of a service, the service if Address is zero, or the node if Service is "" as well.
type DrainTarget struct {
	Service string     `json:"service"`
	Address netip.Addr `json:"address"` // of the backends on the server, which may have several ports
}

// String returns "192.0.2.10 of web".
func (t DrainTarget) String() string { return fmt.Sprintf("%s of %s", t.Address, t.Service) }

// Among reports whether t is the server of one of these backends.
func (t DrainTarget) Among(all []BackendStatus) bool {
	return slices.ContainsFunc(all, func(b BackendStatus) bool {
		return b.Service == t.Service && b.Address == t.Address
	})
}

// changedBy reports whether a change of the configuration is one of t.
func (t DrainTarget) changedBy(c Change) bool {
	if name, ok := strings.CutPrefix(c.Object, "service "); ok {
		return c.Op == Removed && name == t.Service
	}
	name, service, _ := strings.Cut(strings.TrimPrefix(c.Object, "backend "), " of ")
	at, err := netip.ParseAddrPort(name)
	return service == t.Service && (err == nil && at.Addr() == t.Address || name == t.Address.String())
}

// drained is the reason given for VIPs that are not announced because of Drains.
const drained = "drained by the operator"

// With returns d with a target drained or not. A service that is not drained has no drained servers.
func (d Drains) With(t DrainTarget, on bool) Drains {
	switch {
	case t.Address.IsValid():
		d.Backends = with(d.Backends, t, on)
	case t.Service != "":
		d.Services = with(d.Services, t.Service, on)
		if !on {
			d.Backends = slices.DeleteFunc(slices.Clone(d.Backends), func(b DrainTarget) bool {
				return b.Service == t.Service
			})
		}
	default:
		d.Node = on
	}
	return d
}

func with[T comparable](all []T, x T, on bool) []T {
	all = slices.DeleteFunc(slices.Clone(all), func(y T) bool { return y == x })
	if on {
		all = append(all, x)
	}
	return all
}

// Names lists the drained services and backends: "web", "192.0.2.10 of api".
func (d Drains) Names() []string {
	names := slices.Clone(d.Services)
	for _, t := range d.Backends {
		names = append(names, t.String())
	}
	return names
}

// Has reports whether a target is drained itself.
func (d Drains) Has(t DrainTarget) bool {
	switch {
	case t.Address.IsValid():
		return slices.Contains(d.Backends, t)
	case t.Service != "":
		return slices.Contains(d.Services, t.Service)
	}
	return d.Node
}

// After returns d without the backends and weights whose entry in the configuration was changed, and what became of
// these.
func (d Drains) After(changes []Change) (Drains, []Change) {
	var ended []Change
	for _, t := range d.Backends {
		if slices.ContainsFunc(changes, t.changedBy) {
			d = d.With(t, false)
			ended = append(ended, Change{Op: Changed, Object: "backend " + t.String(), Text: "no longer " + drained})
		}
	}
	for _, w := range d.Weights {
		if slices.ContainsFunc(changes, w.changedBy) {
			d = d.WithWeight(w.DrainTarget, -1)
			ended = append(ended, Change{Op: Changed, Object: "backend " + w.DrainTarget.String(),
				Text: fmt.Sprintf("weight no longer %d, %s", w.Weight, weightSet)})
		}
	}
	return d, ended
}

// servers returns the addresses of a service's drained backends, sorted.
func (d Drains) servers(service string) (addrs []netip.Addr) {
	for _, t := range d.Backends {
		if t.Service == service {
			addrs = append(addrs, t.Address)
		}
	}
	slices.SortFunc(addrs, netip.Addr.Compare)
	return addrs
}

// applied returns a service with its drained backends marked as such, and with the weights that were set.
func (d Drains) applied(s *Service) *Service {
	servers, weights := d.servers(s.Name), d.weights(s.Name)
	if len(servers) == 0 && len(weights) == 0 {
		return s
	}
	out := *s
	out.Ports = slices.Clone(s.Ports)
	for i := range out.Ports {
		p := &out.Ports[i]
		p.Backends = slices.Clone(p.Backends)
		for j, b := range p.Backends {
			p.Backends[j].Drain = b.Drain || slices.Contains(servers, b.Addr)
			if w, set := weights[b.Addr]; set {
				p.Backends[j].Weight = w
			}
		}
	}
	return &out
}

// drains reports whether the service's source wants a backend to be drained.
func (s *Service) drains(b Backend) bool {
	return slices.ContainsFunc(s.Ports, func(p ServicePort) bool {
		return slices.ContainsFunc(p.Backends, func(x Backend) bool { return x.ID() == b.ID() && x.Drain })
	})
}

// reason says why the VIPs of a service are not announced for it, or returns "" if the service is not drained.
func (d Drains) reason(service string) string {
	if d.Node || slices.Contains(d.Services, service) {
		return drained
	}
	return ""
}

// Drain replaces the active drains.
func (e *Engine) Drain(d Drains) {
	at := time.Now()
	e.mail.post(func() {
		was := e.drains
		e.drains = d
		for name, en := range e.services {
			if was.reason(name) != d.reason(name) || !slices.Equal(was.servers(name), d.servers(name)) ||
				!maps.Equal(was.weights(name), d.weights(name)) {
				en.service = d.applied(en.given)
				e.markStale(name, at)
			}
		}
	})
}
