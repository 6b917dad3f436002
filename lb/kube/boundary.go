package kube

import (
	"context"
	"fmt"

	core "k8s.io/api/core/v1"
	discovery "k8s.io/api/discovery/v1"
	meta "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/tools/cache"

	"github.com/steelyard-lb/steelyard/lb"
)

// Informers call functions of this package in goroutines of client-go, where a panic ends the process. This file limits
// the effects of a panic to the object that caused it.

// arrived calls f, which handles an object in a goroutine of an informer.
func (s *Source) arrived(x any, f func()) bool { return arrived(s.o.Boundary, lb.PartObject, x, f) }

func arrived(b *lb.Boundary, part lb.Part, x any, f func()) bool {
	name, err := cache.MetaNamespaceKeyFunc(x)
	if err != nil {
		name = "?"
	}
	return b.Do(part, name, f)
}

// slim wraps the function slim for an informer. An EndpointSlice that cannot be read freezes its service.
func (s *Source) slim(x any) (out any, err error) {
	o, ok := x.(*discovery.EndpointSlice)
	if !ok {
		out = x
		s.arrived(x, func() { out, err = slim(x) })
		return out, err
	}
	if !arrived(s.o.Boundary, lb.PartSlice, x, func() { out, err = slim(x) }) {
		out = &endpointSlice{
			ObjectMeta: meta.ObjectMeta{Name: o.Name, Namespace: o.Namespace, ResourceVersion: o.ResourceVersion},
			service:    o.Namespace + "/" + o.Labels[discovery.LabelServiceName], unreadable: true,
		}
	}
	return out, err
}

// reconcile calls reconcileOne inside a boundary. If that panics, the service stays as it was.
func (s *Source) reconcile(name string, sink lb.Sink) {
	if !s.o.Boundary.Do(lb.PartService, name, func() { s.reconcileOne(name, sink) }) {
		s.freeze(name, sink)
	}
}

// reconcileAll reconciles every service that this node serves.
func (s *Source) reconcileAll(sink lb.Sink) {
	for name := range s.put {
		s.reconcile(name, sink)
	}
}

// freeze leaves a service as it is: in the engine or, if this agent has not put it yet, in the kernel.
func (s *Source) freeze(name string, sink lb.Sink) {
	if s.put[name] != nil {
		return
	}
	x, ok, err := s.services.GetByKey(name)
	if err != nil || !ok {
		return
	}
	var frozen *lb.Service
	if !s.arrived(x, func() {
		frozen = &lb.Service{Name: name, Source: Name, VIPs: s.served(x.(*core.Service)), Frozen: true}
		s.pooled(frozen)
	}) || len(frozen.VIPs) == 0 {
		return
	}
	s.put[name] = frozen
	sink.Put(frozen)
}

// handle reconciles one Service. A panic may leave the term's state inconsistent, so it ends the term. The next term
// reads everything again and ignores this Service until it changes.
func (t *term) handle(ctx context.Context, key string) (err error) {
	x, ok, _ := t.services.GetByKey(key)
	if ok {
		if _, stuck := t.stuck.Load(versionOf(x.(*core.Service))); stuck {
			return nil
		}
	}
	if t.skipped[key] { // the Service has changed
		return errDeposed
	}
	if t.o.Boundary.Do(lb.PartAddresses, key, func() { err = t.reconcile(ctx, key) }) {
		return err
	}
	if ok {
		t.stuck.Store(versionOf(x.(*core.Service)), true)
	}
	return errDeposed
}

// take adopts the addresses of a Service at the start of a term; t.mu is held. If the Service cannot be handled, its
// addresses stay reserved.
func (t *term) take(s *core.Service) error {
	_, stuck := t.stuck.Load(versionOf(s))
	if !stuck && t.o.Boundary.Do(lb.PartAddresses, nameOf(s), func() { t.adopt(s) }) {
		return nil
	}
	t.stuck.Store(versionOf(s), true)
	t.skipped[nameOf(s)] = true
	has := union(statusAddresses(s), t.ledger.pendingFor(s).addrs)
	if !t.o.Boundary.Do(lb.PartStatus, nameOf(s), func() { t.assigner.reserve(s, has) }) {
		return fmt.Errorf("the addresses of Service %s cannot be read", nameOf(s))
	}
	return nil
}
