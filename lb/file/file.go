// Package file is the source of the services in the configuration file.
//
// It translates config.Service to lb.Service and sends the engine the difference between one configuration and the
// next. Plan refuses a configuration as a whole if some of its services cannot have an address.
package file

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net/netip"
	"reflect"
	"slices"

	"github.com/steelyard-lb/steelyard/config"
	"github.com/steelyard-lb/steelyard/lb"
)

// Name is the lb.Service.Source of this package's services.
const Name = "file"

// Source implements lb.Source. Its methods may be called before and while Run runs, from one goroutine.
type Source struct {
	next     chan update   // capacity 1: the newest configuration that Run has not received yet
	services []*lb.Service // of the last Apply
	alloc    *lb.Allocator
	store    Store
}

// Assigned holds the addresses that services have from pools, by service name.
type Assigned map[string][]netip.Addr

// Store keeps Assigned for the next start.
type Store interface{ Save(Assigned) }

// New returns a Source without services. Services keep their addresses in had, from the previous run. store may be nil.
func New(had Assigned, store Store) *Source {
	s := &Source{next: make(chan update, 1), alloc: lb.NewAllocator(nil), store: store}
	for name, addrs := range had {
		s.alloc.Take(lb.Holder{Service: name}, addrs)
	}
	return s
}

// Plan is a configuration that Apply can activate, and what that changes.
type Plan struct {
	// Then, if not nil, is called once the sink has the services.
	Then     func()
	Changes  []lb.Change
	Before   int // number of services
	services []*lb.Service
	alloc    *lb.Allocator
	assigned Assigned
}

// update is a configuration for Run.
type update struct {
	services []*lb.Service
	then     []func() // Plan.Then of this plan and of those that it replaces
}

// Plan returns the plan for cfg, and changes nothing. If services cannot be assigned an address, its error joins an
// AddressError for each. The plan reuses the previous copy of an unchanged service, because the engine refers to it,
// and a second copy between short-lived objects would prevent their memory from being returned. It changes cfg only to
// refer to the same copy.
func (s *Source) Plan(cfg *config.Config) (*Plan, error) {
	services, alloc, errs := translate(cfg, s.alloc)
	if len(errs) > 0 {
		return nil, join(errs)
	}
	earlier := make(map[string]*lb.Service, len(s.services))
	for _, old := range s.services {
		earlier[old.Name] = old
	}
	for i, next := range services {
		if old := earlier[next.Name]; old != nil && reflect.DeepEqual(old, next) {
			services[i] = old
			if len(old.Ports) > 0 { // keep one copy; comparing it with itself is fast
				cfg.Services[i].Backends = old.Ports[0].Backends
			}
		}
	}
	p := &Plan{
		Changes: lb.Changes(s.services, services), Before: len(s.services),
		services: services, alloc: alloc, assigned: Assigned{},
	}
	for _, c := range cfg.Services {
		if len(c.Addresses) == 0 {
			p.assigned[c.Name] = alloc.Given(c.Name)
		}
	}
	if s.alloc.Equal(alloc) { // otherwise old memory is kept, as above
		p.alloc = s.alloc
	}
	return p, nil
}

// Apply activates a plan. p must be the newest plan.
func (s *Source) Apply(p *Plan) {
	s.services, s.alloc = p.services, p.alloc
	if s.store != nil {
		s.store.Save(p.assigned)
	}
	next := update{services: p.services}
	select {
	case earlier := <-s.next: // replaced before Run received it
		next.then = earlier.then
	default:
	}
	if p.Then != nil {
		next.then = append(next.then, p.Then)
	}
	s.next <- next
}

// Use plans and applies a configuration.
func (s *Source) Use(cfg *config.Config) error {
	p, err := s.Plan(cfg)
	if err == nil {
		s.Apply(p)
	}
	return err
}

// Run feeds sink until ctx ends. The source is complete after the first configuration.
func (s *Source) Run(ctx context.Context, sink lb.Sink) error {
	current := map[string]*lb.Service{}
	for {
		select {
		case <-ctx.Done():
			return nil
		case next := <-s.next:
			current = apply(sink, current, next.services)
			sink.Complete(Name)
			for _, f := range next.then {
				f()
			}
		}
	}
}

// apply sends sink the difference between two configurations. Deletions come first, because they free ports.
func apply(sink lb.Sink, current map[string]*lb.Service, services []*lb.Service) map[string]*lb.Service {
	next := make(map[string]*lb.Service, len(services))
	for _, s := range services {
		next[s.Name] = s
	}
	for name := range current {
		if next[name] == nil {
			sink.Delete(name)
		}
	}
	for _, s := range services {
		if current[s.Name] != s {
			sink.Put(s)
		}
	}
	return next
}

// AddressError says why a service has no address.
type AddressError struct {
	Service string
	Err     error
}

func (e *AddressError) Error() string { return fmt.Sprintf("service %q: %v", e.Service, e.Err) }

// Unwrap returns the *lb.AssignError.
func (e *AddressError) Unwrap() error { return e.Err }

func join(list []*AddressError) error {
	errs := make([]error, len(list))
	for i, e := range list {
		errs[i] = e
	}
	return errors.Join(errs...)
}

// Unassignable returns the services of cfg that cannot have an address, ordered by name.
func Unassignable(cfg *config.Config) []*AddressError {
	if !slices.ContainsFunc(cfg.Services, func(c config.Service) bool { return len(c.Addresses) == 0 }) {
		return nil
	}
	_, _, errs := translate(cfg, lb.NewAllocator(nil))
	return errs
}

// translate translates the services of cfg, in order. It returns the allocator of their addresses and does not change
// old. It takes fixed addresses and the services' previous ones before it assigns new ones. A new address is chosen by
// the name of its service, so two machines with the same services choose the same addresses.
func translate(cfg *config.Config, old *lb.Allocator) ([]*lb.Service, *lb.Allocator, []*AddressError) {
	pools := Pools(cfg)
	alloc := lb.NewAllocator(pools)
	services := make([]*lb.Service, len(cfg.Services))
	for i, c := range cfg.Services {
		services[i] = translateService(c)
		had := old.Given(c.Name)
		if len(c.Addresses) > 0 {
			had = c.Addresses
		}
		alloc.Take(lb.Holder{Service: c.Name}, had)
	}
	var errs []*AddressError
	for _, i := range byName(services) {
		if len(services[i].VIPs) > 0 {
			continue
		}
		r := request(cfg.Services[i], pools)
		if services[i].VIPPerNode && cfg.L2 != nil {
			r.PerFamily = min(1+len(cfg.L2.Members), lb.VIPsPerNodeMax)
		}
		vips, err := alloc.Assign(r)
		if err != nil {
			errs = append(errs, &AddressError{services[i].Name, err})
		}
		services[i].VIPs = vips
	}
	return services, alloc, errs
}

// byName returns the indices of services, ordered by name. Services that take what is left of a pool come last.
func byName(services []*lb.Service) []int {
	order := make([]int, len(services))
	for i := range order {
		order[i] = i
	}
	slices.SortFunc(order, func(a, b int) int {
		x, y := services[a], services[b]
		switch {
		case x.VIPPerNode == y.VIPPerNode:
			return cmp.Compare(x.Name, y.Name)
		case x.VIPPerNode:
			return 1
		}
		return -1
	})
	return order
}

// Pools returns the pools of cfg for services of the file.
func Pools(cfg *config.Config) []lb.Pool {
	pools := make([]lb.Pool, len(cfg.Pools))
	for i, p := range cfg.Pools {
		pools[i] = lb.Pool{
			Name: p.Name, AutoAssign: p.AutoAssign, Priority: p.Priority, AvoidBuggy: p.AvoidBuggyIPs,
			Announce: p.Announce, Ranges: p.Ranges, AvoidAnycast: cfg.AnnouncesL2(p.Announce),
		}
	}
	return pools
}

// request asks for an address of each family that a service's pool has and that a backend can serve. A service keeps
// its address even if another one now has it as a fixed address; they share it by port.
func request(c config.Service, pools []lb.Pool) lb.Request {
	r := lb.Request{Holder: lb.Holder{Service: c.Name}, Pool: c.Pool, ByName: true}
	i := slices.IndexFunc(pools, func(p lb.Pool) bool { return p.Name == c.Pool })
	if i < 0 {
		return r
	}
	for _, f := range []lb.Family{lb.IPv4, lb.IPv6} {
		inPool := slices.ContainsFunc(pools[i].Ranges, func(r lb.AddrRange) bool { return lb.FamilyOf(r.From) == f })
		served := slices.ContainsFunc(c.Backends, func(b lb.Backend) bool {
			return lb.FamilyOf(b.Addr) == f || c.Method == lb.MethodTunnel
		})
		if inPool && served {
			r.Families = append(r.Families, lb.FamilyRequest{Family: f})
		}
	}
	return r
}

func translateService(c config.Service) *lb.Service {
	return &lb.Service{
		Name: c.Name, Source: Name, VIPs: c.Addresses, Ports: lb.PortsOn(c.Backends, c.Ports...),
		Policy: lb.PolicyCluster, Algorithm: c.Algorithm, Method: c.Method, Encap: c.Encap, Affinity: c.Affinity,
		Allow: c.Allow, MinHealthy: c.MinHealthy, KeepAllDown: c.OnAllDown == config.OnAllDownKeep,
		KeepUnanswered: c.OnAllDown == config.OnAllDownUnanswered, KeepDown: c.OnDown == config.OnDownKeep,
		Check: c.Check, Announce: c.Announce,
		KeepSource: c.Method == lb.MethodNAT && !c.SNAT, VIPPerNode: c.AddressPerNode, LocalClients: true,
	}
}
