// Package file is the source of services that is the configuration file.
//
// It translates config.Service to lb.Service and sends the engine the difference between one configuration and the
// next. Use refuses a configuration whose services cannot all have an address, as a whole, and then changes nothing.
package file

import (
	"context"
	"errors"
	"fmt"
	"reflect"
	"slices"

	"github.com/steelyard-lb/steelyard/config"
	"github.com/steelyard-lb/steelyard/lb"
)

// Name is the Source of every service that comes from here.
const Name = "file"

// Source implements lb.Source. Use may be called before and while Run runs, from one goroutine.
type Source struct {
	next  chan []*lb.Service // capacity 1: the newest configuration that Run has not received yet
	alloc *lb.Allocator
}

// New returns a Source without services.
func New() *Source {
	return &Source{next: make(chan []*lb.Service, 1), alloc: lb.NewAllocator(nil)}
}

// Use makes the services of cfg the wanted ones. When some cannot be assigned an address it changes nothing and returns
// an error that names each.
func (s *Source) Use(cfg *config.Config) error {
	services, alloc, err := translate(cfg, s.alloc)
	if err != nil {
		return err
	}
	s.alloc = alloc
	select {
	case <-s.next: // replaced before Run received it
	default:
	}
	s.next <- services
	return nil
}

// Run feeds sink until ctx ends. The source is complete after the first configuration.
func (s *Source) Run(ctx context.Context, sink lb.Sink) error {
	current := map[string]*lb.Service{}
	for {
		select {
		case <-ctx.Done():
			return nil
		case services := <-s.next:
			current = apply(sink, current, services)
			sink.Complete(Name)
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
		if old := current[s.Name]; old == nil || !reflect.DeepEqual(old, s) {
			sink.Put(s)
		}
	}
	return next
}

// translate translates the services of cfg. It returns the allocator of their addresses and does not change old. It
// takes fixed addresses and those that services have had before it assigns new ones.
func translate(cfg *config.Config, old *lb.Allocator) ([]*lb.Service, *lb.Allocator, error) {
	pools := translatePools(cfg.Pools)
	alloc := lb.NewAllocator(pools)
	for _, c := range cfg.Services {
		had := old.Given(c.Name)
		if len(c.Addresses) > 0 {
			had = c.Addresses
		}
		alloc.Take(lb.Holder{Service: c.Name}, had)
	}
	var services []*lb.Service
	var errs []error
	for _, c := range cfg.Services {
		s := translateService(c)
		if len(s.VIPs) == 0 {
			vips, err := alloc.Assign(request(c, pools))
			if err != nil {
				errs = append(errs, fmt.Errorf("service %q: %w", c.Name, err))
				continue
			}
			s.VIPs = vips
		}
		services = append(services, s)
	}
	return services, alloc, errors.Join(errs...)
}

func translatePools(from []config.Pool) []lb.Pool {
	pools := make([]lb.Pool, len(from))
	for i, p := range from {
		pools[i] = lb.Pool{
			Name: p.Name, AutoAssign: p.AutoAssign, Priority: p.Priority, AvoidBuggy: p.AvoidBuggyIPs,
			Announce: p.Announce, Ranges: p.Ranges,
		}
	}
	return pools
}

// request asks for an address of each family that the pool of a service has and that a backend can serve. A fixed
// address of another service may equal one that the service has: the services share it by port.
func request(c config.Service, pools []lb.Pool) lb.Request {
	r := lb.Request{Holder: lb.Holder{Service: c.Name}, Pool: c.Pool, KeepShared: true}
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
		Allow: c.Allow, MinHealthy: c.MinHealthy, Check: c.Check, Announce: c.Announce,
		KeepSource: c.Method == lb.MethodNAT && !c.SNAT,
	}
}
