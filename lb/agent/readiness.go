package agent

import (
	"sync"

	"github.com/steelyard-lb/steelyard/systemd"
)

// readiness notifies systemd when the agent is ready and when it reloads, and runs one reload at a time. A reload that
// ends before startup is complete must not send READY=1, which ends startup.
type readiness struct {
	notifier *systemd.Notifier

	mu    sync.Mutex // guards ready; held during a reload
	ready bool
}

func newReadiness(n *systemd.Notifier) *readiness { return &readiness{notifier: n} }

// set reports that startup is complete.
func (r *readiness) set() {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.ready = true
	r.notifier.Ready()
}

// exclusive calls f while no reload is under way.
func (r *readiness) exclusive(f func()) {
	r.mu.Lock()
	defer r.mu.Unlock()
	f()
}

// reloading calls reload between RELOADING=1 and READY=1, even if it rejects the configuration.
func (r *readiness) reloading(reload func()) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if !r.ready {
		reload()
		return
	}
	r.notifier.Reloading()
	reload()
	r.notifier.Ready()
}
