package lb

import "slices"

// Drains are what an operator has taken out of service. Its addresses are not announced, as far as no other service has them;
// what still arrives is served all the same.
type Drains struct {
	Node     bool     `json:"node"` // everything
	Services []string `json:"services"`
}

const drained = "drained by the operator"

// With returns d with a service, or with "" the node, drained or not.
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

// hold keeps a plan's addresses from being announced.
func (d Drains) hold(p *Plan) {
	if !d.Node && !slices.Contains(d.Services, p.Service.Name) {
		return
	}
	for i := range p.VIPs {
		if p.VIPs[i].Reason == "" {
			p.VIPs[i].Reason = drained
		}
	}
}

// Drain takes out of service what d says, and nothing else.
func (e *Engine) Drain(d Drains) {
	e.mail.post(func() {
		e.drains = d
		for name := range e.services {
			e.stale[name] = struct{}{}
		}
	})
}
