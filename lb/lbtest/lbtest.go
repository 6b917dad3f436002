// Package lbtest has consumers that record what the engine tells them, fail on demand, and check at every step that no
// VIP is announced without being served.
package lbtest

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"slices"
	"sync"
	"time"

	"github.com/steelyard-lb/steelyard/lb"
)

// ErrInjected is what a consumer returns when it was made to fail.
var ErrInjected = errors.New("injected failure")

// World is a datapath, an announcer and a prober that remember. Its zero value never fails and answers at once.
type World struct {
	// Fail is the probability that a call, or a part of it, fails. Delay is how long a call takes at most.
	Fail  float64
	Delay time.Duration
	Rand  *rand.Rand // required when Fail or Delay is set

	mu         sync.Mutex    // guards all below
	held       chan struct{} // closed by Release; nil: Apply does not wait
	served     map[lb.Frontend]*lb.FrontendPlan
	serving    map[netip.Addr]int // frontends in served, by VIP
	announced  map[netip.Addr]lb.Announcement
	sets       int
	checks     map[string][]lb.Check
	violations []string
}

// NewWorld returns a world in which the kernel already holds frontends, and routers their VIPs.
func NewWorld(held ...lb.Frontend) *World {
	w := &World{served: map[lb.Frontend]*lb.FrontendPlan{}, serving: map[netip.Addr]int{}, announced: map[netip.Addr]lb.Announcement{}, checks: map[string][]lb.Check{}}
	for _, f := range held {
		w.put(f, nil)
		w.announced[f.VIP] = lb.Announcement{VIP: f.VIP}
	}
	return w
}

// Held implements lb.Datapath.
func (w *World) Held() ([]lb.Frontend, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	var held []lb.Frontend
	for f := range w.served {
		held = append(held, f)
	}
	return held, nil
}

// Apply implements lb.Datapath: frontends change one by one, in random order, and each may fail.
func (w *World) Apply(_ context.Context, d lb.Delta) map[lb.Frontend]error {
	w.mu.Lock()
	held := w.held
	w.mu.Unlock()
	if held != nil {
		<-held
	}
	failed := map[lb.Frontend]error{}
	for _, f := range d.Put {
		w.step(f.VIP, func() { w.put(f.Frontend, f) }, func() { failed[f.Frontend] = ErrInjected })
	}
	for _, f := range d.Delete {
		w.step(f.VIP, func() { w.remove(f) }, func() { failed[f] = ErrInjected })
	}
	return failed
}

func (w *World) put(f lb.Frontend, plan *lb.FrontendPlan) {
	w.remove(f)
	w.served[f] = plan
	w.serving[f.VIP]++
}

func (w *World) remove(f lb.Frontend) {
	if _, ok := w.served[f]; ok {
		w.serving[f.VIP]--
	}
	delete(w.served, f)
}

// Set implements lb.Announcer: VIPs change one by one, and a failure leaves the rest as it was.
func (w *World) Set(_ context.Context, set []lb.Announcement) error {
	keep := make(map[netip.Addr]bool, len(set))
	for _, a := range set {
		keep[a.VIP] = true
	}
	w.mu.Lock()
	w.sets++
	var gone []netip.Addr
	for addr := range w.announced {
		if !keep[addr] {
			gone = append(gone, addr)
		}
	}
	w.mu.Unlock()
	failed := false
	for _, addr := range gone {
		w.step(addr, func() { delete(w.announced, addr) }, func() { failed = true })
	}
	for _, a := range set {
		if failed {
			return ErrInjected
		}
		w.step(a.VIP, func() { w.announced[a.VIP] = a }, func() { failed = true })
	}
	if failed {
		return ErrInjected
	}
	return nil
}

// Hold makes calls to Apply wait until Release.
func (w *World) Hold() {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.held = make(chan struct{})
}

// Release ends what Hold began.
func (w *World) Release() {
	w.mu.Lock()
	defer w.mu.Unlock()
	close(w.held)
	w.held = nil
}

// Put implements lb.Prober.
func (w *World) Put(service string, checks []lb.Check) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if len(checks) == 0 {
		delete(w.checks, service)
		return
	}
	w.checks[service] = checks
}

// step makes one change of a VIP, or fails, after a random delay; then it checks the invariant.
func (w *World) step(addr netip.Addr, change, fail func()) {
	if w.Delay > 0 {
		time.Sleep(time.Duration(w.random() * float64(w.Delay)))
	}
	bad := w.Fail > 0 && w.random() < w.Fail
	w.mu.Lock()
	defer w.mu.Unlock()
	if bad {
		fail()
		return
	}
	change()
	if _, announced := w.announced[addr]; announced && w.serving[addr] == 0 {
		w.violations = append(w.violations, fmt.Sprintf("%s is announced but not served", addr))
	}
}

func (w *World) random() float64 {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.Rand.Float64()
}

// Served returns what the kernel holds for f; false when it holds nothing.
func (w *World) Served(f lb.Frontend) (*lb.FrontendPlan, bool) {
	w.mu.Lock()
	defer w.mu.Unlock()
	p, ok := w.served[f]
	return p, ok
}

// Announced returns the announced VIPs, sorted.
func (w *World) Announced() []netip.Addr {
	w.mu.Lock()
	defer w.mu.Unlock()
	out := []netip.Addr{}
	for addr := range w.announced {
		out = append(out, addr)
	}
	slices.SortFunc(out, netip.Addr.Compare)
	return out
}

// Sets returns how often Set was called.
func (w *World) Sets() int {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.sets
}

// Checks returns the checks of a service.
func (w *World) Checks(service string) []lb.Check {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.checks[service]
}

// Violations returns what broke the invariant.
func (w *World) Violations() []string {
	w.mu.Lock()
	defer w.mu.Unlock()
	return slices.Clone(w.violations)
}
