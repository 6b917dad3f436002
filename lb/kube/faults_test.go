package kube

import (
	"context"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	core "k8s.io/api/core/v1"
	meta "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/tools/record"

	"github.com/steelyard-lb/steelyard/lb"
)

// allocators is a cluster with users, another controller, and agents. There is no election: each agent may believe at
// any time that it leads.
type allocators struct {
	*apiServer
	rng    *rand.Rand
	pools  []Pool
	agents [3]struct {
		faults *faults
		stop   func() // nil if it does not lead
	}
	// touched is when another controller last changed a status, or a user externalIPs, by Service.
	touched map[string]time.Time
	// boundary surrounds each Service. It may be nil.
	boundary *lb.Boundary
}

const (
	modelSteps  = 1600
	modelNames  = 14
	modelHold   = "example.com/hold" // a finalizer
	modelSettle = 6 * time.Minute    // every leader knows changes that are older
)

func newAllocators(t *testing.T, seed uint64) *allocators {
	m := &allocators{
		apiServer: newAPIServer(t, seed), rng: rand.New(rand.NewPCG(seed, 1)), touched: map[string]time.Time{},
		pools: []Pool{poolFrom("public", "203.0.113.1", "203.0.113.8", forExternalIPs)},
	}
	for i := range m.agents {
		m.agents[i].faults = &faults{}
	}
	m.written = m.check
	return m
}

// start lets an agent lead.
func (m *allocators) start(i int) {
	name := fmt.Sprint("agent-", i)
	client := m.client(name, m.agents[i].faults)
	a := NewAllocator(AllocatorOptions{
		Client: client, Lease: client, Node: name, Namespace: "steelyard", Pools: m.pools,
		Boundary: m.boundary, Log: discard,
	})
	a.events = &record.FakeRecorder{}
	ctx, cancel := context.WithCancel(m.t.Context())
	done := make(chan struct{})
	go func() {
		a.lead(ctx)
		close(done)
	}()
	m.agents[i].stop = func() { cancel(); <-done }
}

// stopAll stops all agents; their last requests may still be in flight.
func (m *allocators) stopAll() {
	for i := range m.agents {
		if m.agents[i].stop != nil {
			m.agents[i].stop()
			m.agents[i].stop = nil
		}
	}
}

// step is one random event.
func (m *allocators) step() {
	i := m.rng.IntN(len(m.agents))
	a := &m.agents[i]
	switch m.rng.IntN(24) {
	case 0, 1:
		if a.stop == nil {
			m.start(i)
		}
	case 2:
		if a.stop != nil { // a crash: requests that it has sent may still arrive
			a.stop()
			a.stop = nil
		}
	case 3:
		a.faults.set(0, time.Minute, 0)
	case 4:
		a.faults.set(0.3, 0, 3*time.Second)
	case 5:
		a.faults.set(0.05, 0, 100*time.Millisecond)
	case 6, 7:
		a.faults.set(0, 0, 0)
	case 8:
		m.refuse()
	default:
		m.user()
	}
}

// refuse makes the API server refuse writes of one Service's status, or stop refusing them.
func (m *allocators) refuse() {
	m.mu.Lock()
	defer m.mu.Unlock()
	clear(m.refused)
	if m.rng.IntN(3) > 0 {
		m.refused[fmt.Sprintf("default/s%02d", m.rng.IntN(modelNames))] = refusals[m.rng.IntN(len(refusals))]
	}
}

// user performs an action of a user or, rarely, of another controller.
func (m *allocators) user() {
	name := fmt.Sprintf("default/s%02d", m.rng.IntN(modelNames))
	touch := func() { m.touched[name] = time.Now() }
	m.edit(name, func(s *core.Service) *core.Service {
		if s == nil {
			return m.create(name)
		}
		touchExternal := func() {
			if len(s.Spec.ExternalIPs) > 0 {
				touch()
			}
		}
		switch m.rng.IntN(20) {
		case 0, 1, 2, 3, 4, 5:
			if len(s.Finalizers) == 0 {
				return nil
			}
			s.DeletionTimestamp = &meta.Time{Time: time.Now()}
		case 6:
			s.Finalizers = slices.DeleteFunc(s.Finalizers, func(f string) bool { return f == modelHold })
		case 7:
			touchExternal()
			if s.Spec.Ports[0].Port = int32(80 + m.rng.IntN(3)); m.rng.IntN(2) == 0 {
				s.Spec.Ports = append(s.Spec.Ports[:1], core.ServicePort{Port: int32(90 + m.rng.IntN(2))})
			}
		case 8:
			touchExternal()
			s.Annotations = map[string]string{wantShare[0]: []string{"", "x", "y"}[m.rng.IntN(3)]}
		case 9:
			touch()
			s.Status = core.ServiceStatus{}
			if s.Spec.Type = core.ServiceTypeClusterIP; m.rng.IntN(2) == 0 {
				s.Spec.Type = core.ServiceTypeLoadBalancer
			}
		case 10:
			if m.rng.IntN(4) == 0 && s.Spec.Type == core.ServiceTypeLoadBalancer {
				touch()
				s.Status = core.ServiceStatus{}
				given([]string{"203.0.113.3", "192.0.2.1"}[m.rng.IntN(2)])(s)
				setManager(s, "other")
			}
		default:
			s.Labels = map[string]string{"n": fmt.Sprint(m.rng.Int())}
		}
		return s
	})
}

// setManager records who wrote the addresses in a status. The finalizer is ours.
func setManager(s *core.Service, name string) { setManagers(s, name, fieldManager) }

func (m *allocators) create(name string) *core.Service {
	delete(m.touched, name)
	return wanting(strings.TrimPrefix(name, "default/"), func(s *core.Service) {
		s.ResourceVersion = ""
		s.Spec.Ports[0].Port = int32(80 + m.rng.IntN(3))
		if m.rng.IntN(4) == 0 {
			s.Finalizers = []string{modelHold}
		}
		if key := []string{"", "", "x", "y"}[m.rng.IntN(4)]; key != "" {
			s.Annotations = map[string]string{wantShare[0]: key}
		}
		switch m.rng.IntN(8) {
		case 0:
			m.touched[name] = time.Now()
			s.Spec.Type = core.ServiceTypeClusterIP
			s.Spec.ExternalIPs = []string{fmt.Sprint("203.0.113.", 1+m.rng.IntN(8))}
		case 1:
			s.Spec.LoadBalancerIP = fmt.Sprint("203.0.113.", 1+m.rng.IntN(8))
		}
	})
}

// check is the model of what an agent may write. It is called with the server's lock held.
func (m *allocators) check(client string, old, now *core.Service) {
	had, has, key := statusAddresses(old), statusAddresses(now), nameOf(now)
	for name, other := range m.services {
		if name == key || m.recent(name) || m.recent(key) || !matchesClass(other, "") || isReleased(other) {
			continue
		}
		for _, addr := range has {
			if slices.Contains(statusAddresses(other), addr) && overlap(now, other) {
				m.t.Errorf("%s: %s gives %s %q of %s, and %s has %q", m.at(), client, key, recordOf(now), addr, name,
					recordOf(other))
			}
		}
	}
	if slices.Equal(had, has) {
		return
	}
	if len(had) > 0 && !wroteStatus(old) && old.DeletionTimestamp == nil && !extends(old, has) {
		m.t.Errorf("%s: %s overwrites the status %v of %s, which is not from us, with %v",
			m.at(), client, had, key, has)
	}
	if len(had) > 0 && matchesClass(old, "") && old.DeletionTimestamp == nil && !m.recent(key) {
		m.t.Errorf("%s: %s takes %v from %s for %v", m.at(), client, had, key, has)
	}
	for _, addr := range has {
		for name, other := range m.services {
			if slices.Contains(had, addr) || name == key || m.recent(name) || m.recent(key) {
				continue
			}
			if slices.Contains(externalIPsOf(other), addr) && !(claim{now, true}).joins(claim{other, true}, false) {
				m.t.Errorf("%s: %s gives %s to %s, and %s has it", m.at(), client, addr, key, name)
			}
		}
	}
}

// overlap reports whether two Services have a port in common according to their statuses.
func overlap(a, b *core.Service) bool {
	return slices.ContainsFunc(holds(a).Ports, func(p lb.Port) bool { return slices.Contains(holds(b).Ports, p) })
}

func (m *allocators) recent(name string) bool { return time.Since(m.touched[name]) < modelSettle }

func (m *allocators) at() string { return fmt.Sprint("version ", m.version) }

// quiet ends all faults, lets one agent lead, and checks that all Services have what they should.
func (m *allocators) quiet() {
	m.stopAll()
	for i := range m.agents {
		m.agents[i].faults.set(0, 0, 0)
	}
	time.Sleep(2 * time.Minute) // late requests
	for n := range modelNames {
		m.edit(fmt.Sprintf("default/s%02d", n), func(s *core.Service) *core.Service {
			if s != nil {
				s.Finalizers = slices.DeleteFunc(s.Finalizers, func(f string) bool { return f == modelHold })
			}
			return s
		})
	}
	i := m.rng.IntN(len(m.agents))
	m.start(i)
	pass(2 * modelSettle)
	m.mu.Lock()
	defer m.mu.Unlock()
	used := map[netip.Addr]bool{}
	for _, s := range m.services {
		for _, addr := range append(statusAddresses(s), externalIPsOf(s)...) {
			used[addr] = true
		}
	}
	for name, s := range m.services {
		has := statusAddresses(s)
		if _, ok := m.refused[name]; ok { // an address that is in no status may be reserved for it
			continue
		}
		if s.DeletionTimestamp != nil || !matchesClass(s, "") && len(has) > 0 {
			m.t.Errorf("%s: %s is left with %v, finalizers %v", m.at(), name, has, s.Finalizers)
		}
		if matchesClass(s, "") && len(has) == 0 && s.Spec.LoadBalancerIP == "" && len(used)+len(m.refused) < 8 {
			m.t.Errorf("%s: %s has no address, and %d are in use", m.at(), name, len(used))
		}
		for other, o := range m.services {
			if _, ok := m.refused[other]; ok || other >= name {
				continue
			}
			if !matchesClass(s, "") || !matchesClass(o, "") || !wroteStatus(s) || !wroteStatus(o) {
				continue
			}
			for _, addr := range has {
				if slices.Contains(statusAddresses(o), addr) && overlap(s, o) {
					m.t.Errorf("%s: %s and %s have %s", m.at(), name, other, addr)
				}
			}
		}
	}
}

// Whatever fails, no port of an address is assigned to two Services, no Service loses an address, and no status of
// another controller is overwritten. Any number of agents believe that they lead, as happens when clocks differ or a
// process was suspended.
func TestAllocatorWithFaults(t *testing.T) {
	for seed := range uint64(3) {
		t.Run(fmt.Sprint("seed ", seed), func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				m := newAllocators(t, seed)
				for n := range modelSteps {
					m.step()
					time.Sleep(time.Duration(m.rng.IntN(3000)) * time.Millisecond)
					if n%400 == 399 {
						if m.quiet(); t.Failed() {
							break
						}
					}
				}
				m.stopAll()
				time.Sleep(5 * time.Minute)
			})
		})
	}
}
