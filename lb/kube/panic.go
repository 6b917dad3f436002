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

// While the kubelets cannot report, Kubernetes declares all endpoints not ready, although they serve. When the nodes
// reach the API server again, each learns that no service has an endpoint, and all would withdraw all addresses until
// the kubelets have reported. So after an interruption of its own watch, a node keeps the last endpoints of a service
// for a while, at a lower preference, and probes them itself.

// interruptionMin is the shortest interruption of the watch that counts.
const interruptionMin = 10 * time.Second

// clockSkew bounds the difference between this node's clock and the clock of the controller that writes Node
// conditions.
const clockSkew = 10 * time.Second

// interruption is a period in which the API server did not answer.
type interruption struct {
	from, until time.Time // until when it may explain that endpoints are not usable

	mu     sync.Mutex      // guards all below
	silent map[string]bool // nodes whose kubelets did not report during the interruption, either; presumed at first
	toAsk  []string
	asking bool
}

// Interrupted tells the Source that the API server answers again, and since when it did not. It may be called from any
// goroutine.
func (s *Source) Interrupted(since time.Time) {
	if time.Since(since) < interruptionMin || s.o.PanicHold == 0 {
		return
	}
	s.interrupted.Store(&interruption{
		from: since.Add(-clockSkew), until: time.Now().Add(s.o.PanicHold), silent: map[string]bool{},
	})
}

// lastUsable has a service's slices from when it last had a usable endpoint, and until when they are kept, or zero.
type lastUsable struct {
	slices []*endpointSlice
	until  time.Time
}

func (e endpoint) usable() bool { return e.ready || e.serving && e.terminating }

// kept returns the slices of a service. If an interruption explains why no endpoint is usable now, their endpoints are
// as they were before it.
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

// asBefore returns now with the endpoints' conditions from before, except for endpoints that are terminating.
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

// allSilent reports whether the nodes of all usable endpoints are silent. A node is presumed to be silent until the API
// server has answered.
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

// askNodes reads the nodes in toAsk from the API server. It does not watch them, because most changes of Nodes are
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
		// The nodes' ClusterRole permits list, but not get. Version 0 reads from the API server's cache.
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

// isSilent reports whether a node's kubelet does not report, or started to report again only after since.
func isSilent(n *core.Node, since time.Time) bool {
	return slices.ContainsFunc(n.Status.Conditions, func(c core.NodeCondition) bool {
		return c.Type == core.NodeReady && (c.Status == core.ConditionUnknown ||
			c.Status == core.ConditionTrue && c.LastTransitionTime.After(since))
	})
}

// keep lowers the preference of a service whose endpoints are kept, and probes them. A failed probe ends an endpoint's
// use.
func (s *Source) keep(service *lb.Service) {
	const text = "no endpoint has been usable since the API server's outage; the last ones are kept for panic_hold, %s"
	service.LowerPreference = cmp.Or(service.LowerPreference, fmt.Sprintf(text, s.o.PanicHold))
	service.Check = lb.ProbeDirectly(service)
	service.Check.Fall, service.Check.Presumed = 1, true
}
