package lb

import (
	"sync"
	"time"
)

// Progress is how far the engine has got. It is for frequent readers, because reading it costs the engine nothing.
type Progress struct {
	// Applied is set once every source is complete, every service has had a plan, and the datapath has tried every
	// frontend.
	Applied bool
	// Behind is when the datapath began to lack a wanted frontend or an update of one, or zero.
	Behind time.Time
	// Waiting is when the oldest unfinished event was posted, or zero if there is none. If the engine does not respond,
	// this time is long ago.
	Waiting time.Time
}

// progress is what the engine publishes.
type progress struct {
	mu      sync.Mutex // guards all below
	applied bool
	behind  time.Time
	// lacking has, for each service with a plan, the number of its frontends that no call has put yet.
	lacking map[string]int
	refused map[string]bool // services with a frontend that belongs to another service
}

// Progress returns the state of the engine at the end of its last round.
func (e *Engine) Progress() Progress {
	e.progress.mu.Lock()
	defer e.progress.mu.Unlock()
	return Progress{Applied: e.progress.applied, Behind: e.progress.behind, Waiting: e.mail.waiting()}
}

// InForce reports whether the datapath has applied a plan for each of the service's frontends since the agent started.
// A later plan may be pending.
func (e *Engine) InForce(service string) bool {
	e.progress.mu.Lock()
	defer e.progress.mu.Unlock()
	lacking, planned := e.progress.lacking[service]
	return planned && lacking == 0 && !e.progress.refused[service]
}

// round publishes the state at the end of an engine round.
func (p *progress) round(behind time.Time, applied bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.behind, p.applied = behind, p.applied || applied
}

// planned records that a service has a plan, and whether one of its frontends was refused.
func (p *progress) planned(service string, refused bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.lacking[service] += 0
	if delete(p.refused, service); refused {
		p.refused[service] = true
	}
}

// forget records that a service no longer has a plan.
func (p *progress) forget(service string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	delete(p.lacking, service)
	delete(p.refused, service)
}

// count adds n to the number of frontends that a service lacks.
func (p *progress) count(service string, n int) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.lacking[service] += n
}
