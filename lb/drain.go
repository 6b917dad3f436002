package lb

import (
	"slices"
	"time"
)

// Drains are the services, or the whole node, that an operator has taken out of service. Their VIPs are not announced
// unless another service also uses them. Packets that still arrive are forwarded.
type Drains struct {
	Node     bool     `json:"node"` // every service
	Services []string `json:"services"`
}

// drained is the reason given for VIPs that are not announced because of Drains.
const drained = "drained by the operator"

// With returns d with a service drained or not. The service "" means the node.
func (d Drains) With(service string, on bool) Drains {
	if service == "" {
		d.Node = on
		return d
	}
	d.Services = slices.DeleteFunc(slices.Clone(d.Services), func(s string) bool { return s == service })
	if on {
		d.Services = append(d.Services, service)
	}
	return d
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
		for name := range e.services {
			if was.reason(name) != d.reason(name) {
				e.markStale(name, at)
			}
		}
	})
}
