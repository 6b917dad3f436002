package kube

import (
	"cmp"
	"context"
	"fmt"
	"net/netip"
	"slices"
	"sync"
	"time"

	core "k8s.io/api/core/v1"
	meta "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"

	"github.com/steelyard-lb/steelyard/lb"
)

// While the API server receives no reports of the kubelets, it declares all endpoints not ready, although they serve.
// When the nodes reach it again, each learns that no service has an endpoint, and all would withdraw all addresses
// until the kubelets have reported. So after an interruption of its own watch, a node keeps the last endpoints of a
// service for a while, at a lower preference, and probes them itself.

// interruptionMin is the shortest interruption of the watch that counts.
const interruptionMin = 10 * time.Second

// clockSkew bounds the difference between the clocks of this node and of what writes the conditions of Nodes.
const clockSkew = 10 * time.Second

// interruption is a time in which the API server was away.
type interruption struct {
	from, until time.Time // until when it may explain that endpoints are not usable

	mu     sync.Mutex      // guards all below
	silent map[string]bool // nodes whose kubelets have not reported during the interruption, either; presumed at first
	toAsk  []string
	asking bool
}

// Interrupted is called when the API server is reachable again after it was away since a time. It may be called from
// any goroutine.
func (s *Source) Interrupted(since time.Time) {
	if time.Since(since) < interruptionMin || s.o.PanicHold == 0 {
		return
	}
	s.interrupted.Store(&interruption{
		from: since.Add(-clockSkew), until: time.Now().Add(s.o.PanicHold), silent: map[string]bool{},
	})
}

// lastUsable has the slices of a service when it last had a usable endpoint, and until when its endpoints are kept, or
// zero.
type lastUsable struct {
	slices []*endpointSlice
	until  time.Time
}

func (e endpoint) usable() bool { return e.ready || e.serving && e.terminating }

// kept returns the slices of a service with the endpoints as they were before an interruption, if it is the cause that
// none is usable now.
func (s *Source) kept(name string, now []*endpointSlice) (with []*endpointSlice, kept bool) {
	if anyUsable(now) {
		s.usable[name] = lastUsable{slices: now}
		return now, false
	}
	last, known := s.usable[name]
	i := s.interrupted.Load()
	if known && i != nil && last.until.IsZero() && time.Now().Before(i.until) {
		last.until = time.Now().Add(s.o.PanicHold)
		s.usable[name] = last
		s.queue.AddAfter(name, s.o.PanicHold)
	}
	if known && i != nil && time.Now().Before(last.until) {
		with = asBefore(now, last.slices)
		if anyUsable(with) && s.allSilent(i, with) {
			return with, true
		}
	}
	delete(s.usable, name)
	return now, false
}

func anyUsable(all []*endpointSlice) bool {
	return slices.ContainsFunc(all, func(x *endpointSlice) bool {
		return slices.ContainsFunc(x.endpoints, endpoint.usable)
	})
}

// asBefore returns slices in which the endpoints have their earlier conditions, except those that terminate now.
func asBefore(now, before []*endpointSlice) (all []*endpointSlice) {
	were := map[netip.Addr]endpoint{}
	for _, x := range before {
		for _, e := range x.endpoints {
			if e.usable() {
				were[e.at.Addr()] = e
			}
		}
	}
	for _, x := range now {
		out := *x
		out.endpoints = slices.Clone(x.endpoints)
		for i, e := range out.endpoints {
			if was, ok := were[e.at.Addr()]; ok && !e.terminating {
				out.endpoints[i] = was
			}
		}
		all = append(all, &out)
	}
	return all
}

// allSilent reports whether the nodes of all usable endpoints are silent. Until the API server has answered, they are
// presumed to be.
func (s *Source) allSilent(i *interruption, all []*endpointSlice) bool {
	i.mu.Lock()
	defer i.mu.Unlock()
	silent := true
	for _, x := range all {
		for _, e := range x.endpoints {
			if !e.usable() || !silent {
				continue
			}
			was, asked := i.silent[e.node]
			if !asked && e.node != "" {
				i.silent[e.node], was = true, true
				i.toAsk = append(i.toAsk, e.node)
			}
			silent = was
		}
	}
	if len(i.toAsk) > 0 && !i.asking {
		i.asking = true
		go s.askNodes(i)
	}
	return silent
}

// askNodes asks the API server for the nodes in toAsk. There is no watch of them: most of the changes of Nodes are
// heartbeats.
func (s *Source) askNodes(i *interruption) {
	ctx, cancel := context.WithDeadline(context.Background(), i.until)
	defer cancel()
	for {
		i.mu.Lock()
		if i.asking = len(i.toAsk) > 0; !i.asking {
			i.mu.Unlock()
			return
		}
		name := i.toAsk[0]
		i.toAsk = i.toAsk[1:]
		i.mu.Unlock()
		// Nodes may only list. Version 0: from the cache of the API server.
		list, err := s.o.Client.CoreV1().Nodes().List(ctx, meta.ListOptions{
			ResourceVersion: "0", FieldSelector: fields.OneTermEqualSelector("metadata.name", name).String(),
		})
		if err != nil {
			s.o.Log.Debug("node not read", "node", name, "err", err)
			continue
		}
		if !slices.ContainsFunc(list.Items, func(n core.Node) bool { return n.Name == name && isSilent(&n, i.from) }) {
			i.mu.Lock()
			i.silent[name] = false
			i.mu.Unlock()
			s.queue.Add(everything)
		}
	}
}

// isSilent reports whether the kubelet of a node does not report, or reports again since a time.
func isSilent(n *core.Node, since time.Time) bool {
	return slices.ContainsFunc(n.Status.Conditions, func(c core.NodeCondition) bool {
		return c.Type == core.NodeReady && (c.Status == core.ConditionUnknown ||
			c.Status == core.ConditionTrue && c.LastTransitionTime.After(since))
	})
}

// keep lowers the preference of a service whose endpoints are kept. A probe that fails ends that for its endpoint.
func (s *Source) keep(service *lb.Service) {
	const text = "no endpoint is usable since the API server was away; the last ones are kept for panic_hold, %s"
	service.LowerPreference = cmp.Or(service.LowerPreference, fmt.Sprintf(text, s.o.PanicHold))
	service.Check = lb.ProbeDirectly(service)
	service.Check.Fall, service.Check.Presumed = 1, true
}
