// Package file is the source of services that is the configuration file.
//
// It turns config.Service into lb.Service and tells the engine the difference between one configuration and the next.
// It knows nothing of what runs; a configuration that cannot be carried out is refused as a whole by Use, before
// anything running is touched.
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
	next  chan []*lb.Service // capacity 1: the newest configuration that Run has not taken yet
	alloc *lb.Allocator
}

// New returns a Source without services.
func New() *Source {
	return &Source{next: make(chan []*lb.Service, 1), alloc: lb.NewAllocator()}
}

// Use makes the services of cfg the wanted ones. When some cannot be given an address it changes nothing and returns an
// error that names each.
func (s *Source) Use(cfg *config.Config) error {
	services, alloc, err := translate(cfg, s.alloc)
	if err != nil {
		return err
	}
	s.alloc = alloc
	select {
	case <-s.next: // overtaken before Run took it
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

// apply tells sink the difference between two configurations. What is gone goes first: others may want its ports.
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

// translate turns the services of cfg into the model. Addresses from pools are given by a copy of alloc, which is
// returned; fixed addresses are taken first, so that no pool gives them away.
func translate(cfg *config.Config, old *lb.Allocator) ([]*lb.Service, *lb.Allocator, error) {
	pools := make([]lb.Pool, len(cfg.Pools))
	for i, p := range cfg.Pools {
		pools[i] = lb.Pool{Name: p.Name, AutoAssign: p.AutoAssign, Priority: p.Priority, AvoidBuggy: p.AvoidBuggyIPs, Announce: p.Announce}
		for _, r := range p.Ranges {
			pools[i].Ranges = append(pools[i].Ranges, lb.AddrRange{From: r.From, To: r.To})
		}
	}
	alloc := lb.NewAllocator()
	for _, c := range cfg.Services {
		switch had := old.Given(c.Name); {
		case len(c.Addresses) > 0:
			alloc.Take(c.Name, c.Addresses)
		case len(had) > 0:
			alloc.Take(c.Name, had)
		}
	}
	var services []*lb.Service
	var errs []error
	for _, c := range cfg.Services {
		s := translateService(c)
		if len(s.VIPs) == 0 {
			vips, err := alloc.Allocate(c.Name, c.Pool, wants(c, pools, true), wants(c, pools, false), pools)
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

// wants reports whether a service needs an address of a family: its pool has the family, and a backend could serve it.
func wants(c config.Service, pools []lb.Pool, is4 bool) bool {
	i := slices.IndexFunc(pools, func(p lb.Pool) bool { return p.Name == c.Pool })
	return i >= 0 &&
		slices.ContainsFunc(pools[i].Ranges, func(r lb.AddrRange) bool { return r.From.Is4() == is4 }) &&
		slices.ContainsFunc(c.Backends, func(b lb.Backend) bool { return b.Addr.Is4() == is4 || c.Method == lb.MethodTunnel })
}

func translateService(c config.Service) *lb.Service {
	return &lb.Service{
		Name: c.Name, Source: Name, VIPs: c.Addresses, Ports: lb.PortsOn(c.Backends, c.Ports...), Policy: lb.PolicyCluster,
		Algorithm: c.Algorithm, Method: c.Method, Encap: c.Encap, Affinity: c.Affinity, Allow: c.Allow,
		MinHealthy: c.MinHealthy, Check: c.Check, Announce: c.Announce,
	}
}
