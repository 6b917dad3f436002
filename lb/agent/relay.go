package agent

import (
	"sync"

	"github.com/steelyard-lb/steelyard/lb"
)

// healthRelay passes health reports from a prober to a receiver that is created later. It buffers reports, in order,
// until deliverTo. The zero value is ready to use.
type healthRelay struct {
	mu   sync.Mutex // guards all below; held while a report is delivered, to keep the order
	to   func(lb.Health)
	kept []lb.Health
}

func (r *healthRelay) report(h lb.Health) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.to == nil {
		r.kept = append(r.kept, h)
		return
	}
	r.to(h)
}

// deliverTo sets the receiver, and delivers the buffered reports. to must not block or call the relay.
func (r *healthRelay) deliverTo(to func(lb.Health)) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, h := range r.kept {
		to(h)
	}
	r.to, r.kept = to, nil
}
