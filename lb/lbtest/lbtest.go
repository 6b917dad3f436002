// Package lbtest has a fixture for tests of lb.Engine: consumers that record the engine's calls, fail on demand, and
// check after every change that no VIP is announced without being served.
package lbtest

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"net/netip"
	"slices"
	"sync"
	"time"

	"github.com/steelyard-lb/steelyard/lb"
)

// ErrInjected is the error of a call that failed because of Fixture.Fail.
var ErrInjected = errors.New("injected failure")

// Fixture is a datapath, an announcer and a prober in memory. With a zero Fail and Delay it never fails and returns
// immediately. Create one with New.
type Fixture struct {
	// Fail is the probability that one change in a call fails. Delay is the longest time that one change takes.
	Fail  float64
	Delay time.Duration
	Rand  *rand.Rand // required if Fail or Delay is set

	mu         sync.Mutex    // guards all below
	paused     chan struct{} // closed by Resume; if nil, Apply does not wait
	served     map[lb.Frontend]*lb.FrontendPlan
	serving    map[netip.Addr]int // frontends in served, by VIP
	announced  map[netip.Addr]lb.Announcement
	sets       int
	checks     map[string][]lb.Check
	violations []string
}

// New returns a Fixture whose datapath already holds frontends and whose announcer announces their VIPs.
func New(held ...lb.Frontend) *Fixture {
	fx := &Fixture{
		served: map[lb.Frontend]*lb.FrontendPlan{}, serving: map[netip.Addr]int{},
		announced: map[netip.Addr]lb.Announcement{}, checks: map[string][]lb.Check{},
	}
	for _, f := range held {
		fx.put(f, nil)
		fx.announced[f.VIP] = lb.Announcement{VIP: f.VIP}
	}
	return fx
}

// Held implements lb.Datapath.
func (fx *Fixture) Held() ([]lb.Frontend, error) {
	fx.mu.Lock()
	defer fx.mu.Unlock()
	var held []lb.Frontend
	for f := range fx.served {
		held = append(held, f)
	}
	return held, nil
}

// Apply implements lb.Datapath: frontends change one by one, in random order, and each may fail.
func (fx *Fixture) Apply(_ context.Context, d lb.Delta) map[lb.Frontend]error {
	fx.mu.Lock()
	paused := fx.paused
	fx.mu.Unlock()
	if paused != nil {
		<-paused
	}
	failed := map[lb.Frontend]error{}
	for _, f := range d.Put {
		fx.step(f.VIP, func() { fx.put(f.Frontend, f) }, func() { failed[f.Frontend] = ErrInjected })
	}
	for _, f := range d.Delete {
		fx.step(f.VIP, func() { fx.remove(f) }, func() { failed[f] = ErrInjected })
	}
	return failed
}

func (fx *Fixture) put(f lb.Frontend, plan *lb.FrontendPlan) {
	fx.remove(f)
	fx.served[f] = plan
	fx.serving[f.VIP]++
}

func (fx *Fixture) remove(f lb.Frontend) {
	if _, ok := fx.served[f]; ok {
		fx.serving[f.VIP]--
	}
	delete(fx.served, f)
}

// Set implements lb.Announcer: VIPs change one by one, and a failure leaves the rest as they were.
func (fx *Fixture) Set(_ context.Context, set []lb.Announcement) error {
	keep := make(map[netip.Addr]bool, len(set))
	for _, a := range set {
		keep[a.VIP] = true
	}
	fx.mu.Lock()
	fx.sets++
	var withdrawn []netip.Addr
	for addr := range fx.announced {
		if !keep[addr] {
			withdrawn = append(withdrawn, addr)
		}
	}
	fx.mu.Unlock()
	failed := false
	for _, addr := range withdrawn {
		fx.step(addr, func() { delete(fx.announced, addr) }, func() { failed = true })
	}
	for _, a := range set {
		if failed {
			return ErrInjected
		}
		fx.step(a.VIP, func() { fx.announced[a.VIP] = a }, func() { failed = true })
	}
	if failed {
		return ErrInjected
	}
	return nil
}

// Pause makes calls to Apply block until Resume.
func (fx *Fixture) Pause() {
	fx.mu.Lock()
	defer fx.mu.Unlock()
	fx.paused = make(chan struct{})
}

// Resume unblocks the calls to Apply.
func (fx *Fixture) Resume() {
	fx.mu.Lock()
	defer fx.mu.Unlock()
	close(fx.paused)
	fx.paused = nil
}

// Put implements lb.Prober.
func (fx *Fixture) Put(service string, checks []lb.Check) {
	fx.mu.Lock()
	defer fx.mu.Unlock()
	if len(checks) == 0 {
		delete(fx.checks, service)
		return
	}
	fx.checks[service] = checks
}

// step makes one change of a VIP, or fails, after a random delay; then it checks the invariant.
func (fx *Fixture) step(addr netip.Addr, change, fail func()) {
	if fx.Delay > 0 {
		time.Sleep(time.Duration(fx.random() * float64(fx.Delay)))
	}
	fx.mu.Lock()
	rate := fx.Fail
	fx.mu.Unlock()
	bad := rate > 0 && fx.random() < rate
	fx.mu.Lock()
	defer fx.mu.Unlock()
	if bad {
		fail()
		return
	}
	change()
	if _, announced := fx.announced[addr]; announced && fx.serving[addr] == 0 {
		fx.violations = append(fx.violations, fmt.Sprintf("%s is announced but not served", addr))
	}
}

// SetFail sets Fail while an engine runs.
func (fx *Fixture) SetFail(rate float64) {
	fx.mu.Lock()
	defer fx.mu.Unlock()
	fx.Fail = rate
}

func (fx *Fixture) random() float64 {
	fx.mu.Lock()
	defer fx.mu.Unlock()
	return fx.Rand.Float64()
}

// Served returns the plan that the datapath holds for f, which is nil for a frontend given to New, or false if it does
// not hold f.
func (fx *Fixture) Served(f lb.Frontend) (*lb.FrontendPlan, bool) {
	fx.mu.Lock()
	defer fx.mu.Unlock()
	p, ok := fx.served[f]
	return p, ok
}

// Announced returns the announced VIPs, sorted.
func (fx *Fixture) Announced() []netip.Addr {
	fx.mu.Lock()
	defer fx.mu.Unlock()
	out := []netip.Addr{}
	for addr := range fx.announced {
		out = append(out, addr)
	}
	slices.SortFunc(out, netip.Addr.Compare)
	return out
}

// Announcements returns what is announced, sorted by address.
func (fx *Fixture) Announcements() []lb.Announcement {
	fx.mu.Lock()
	defer fx.mu.Unlock()
	return slices.SortedFunc(maps.Values(fx.announced), func(a, b lb.Announcement) int { return a.VIP.Compare(b.VIP) })
}

// Sets returns the number of calls to Set.
func (fx *Fixture) Sets() int {
	fx.mu.Lock()
	defer fx.mu.Unlock()
	return fx.sets
}

// Checks returns the checks of a service.
func (fx *Fixture) Checks(service string) []lb.Check {
	fx.mu.Lock()
	defer fx.mu.Unlock()
	return fx.checks[service]
}

// Violations describes each moment at which a VIP was announced but not served.
func (fx *Fixture) Violations() []string {
	fx.mu.Lock()
	defer fx.mu.Unlock()
	return slices.Clone(fx.violations)
}
