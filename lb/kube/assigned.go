package kube

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"time"

	core "k8s.io/api/core/v1"
	apimeta "k8s.io/apimachinery/pkg/api/meta"
	meta "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/steelyard-lb/steelyard/lb"
)

// This file reports that a Service has no address, and why.

// conditionAssigned is set on Services that could not have their address or one of their ports: False with the reason,
// True with the reason while they keep another address, and True without a reason once that is resolved.
const conditionAssigned = ourPrefix + "AddressAssigned"

// conditionsOfOthers returns the conditions in a Service's status except ours.
func conditionsOfOthers(s *core.Service) []meta.Condition {
	return slices.DeleteFunc(slices.Clone(s.Status.Conditions), func(c meta.Condition) bool {
		return c.Type == conditionAssigned || c.Type == conditionShared
	})
}

// assignedCondition returns the Service's conditionAssigned, or nil if it has none.
func assignedCondition(s *core.Service) *meta.Condition {
	return apimeta.FindStatusCondition(s.Status.Conditions, conditionAssigned)
}

// conditionsAfter returns the conditions of a Service after a decision. A Service that gets its addresses immediately
// and shares none has none of our conditions, which keeps the caches of all nodes small.
func conditionsAfter(s *core.Service, d decision) []meta.Condition {
	all := slices.Clone(s.Status.Conditions)
	switch {
	case (d.reason == reasonFailed || d.reason == reasonRefused) && len(d.addrs) == 0,
		d.reason == reasonPortInUse && isOurs(s):
		apimeta.SetStatusCondition(&all, meta.Condition{
			Type: conditionAssigned, Status: meta.ConditionFalse, Reason: d.reason, Message: d.warning,
		})
	case (d.reason == reasonFailed || d.reason == reasonUnpooled) && isOurs(s): // others may overwrite theirs forever
		apimeta.SetStatusCondition(&all, meta.Condition{
			Type: conditionAssigned, Status: meta.ConditionTrue, Reason: d.reason, Message: d.warning,
		})
	case assignedCondition(s) != nil:
		apimeta.SetStatusCondition(&all, meta.Condition{
			Type: conditionAssigned, Status: meta.ConditionTrue, Reason: "Assigned",
		})
	}
	switch {
	case d.record == "" || len(d.addrs) == 0:
		apimeta.RemoveStatusCondition(&all, conditionShared)
	case d.record != recordOf(s):
		apimeta.SetStatusCondition(&all, meta.Condition{
			Type: conditionShared, Status: meta.ConditionTrue, Reason: "Shared", Message: d.record,
		})
	}
	return all
}

// conditionsFor is like conditionsAfter but keeps a condition about addresses that somebody has changed since it was
// written: another allocator may have other pools, and the two must not overwrite each other forever. text is the
// condition's message, for wroteCondition, or "" if the condition is not new.
func (t *term) conditionsFor(s *core.Service, d decision) (all []meta.Condition, text string) {
	all = conditionsAfter(s, d)
	i := slices.IndexFunc(all, func(c meta.Condition) bool { return c.Type == conditionAssigned })
	if i < 0 || said(s, d) {
		return all, ""
	}
	text = all[i].Message
	t.mu.Lock()
	defer t.mu.Unlock()
	last, before := t.wrote[nameOf(s)], assignedCondition(s)
	switch {
	case text == "" || last.text != text || time.Since(last.at) > saidFor:
	case before == nil:
		return slices.Delete(all, i, i+1), ""
	default:
		all[i] = *before
		return all, ""
	}
	return all, text
}

// wroteCondition records that a condition was written. An empty text means no condition, or one without a reason.
func (t *term) wroteCondition(s *core.Service, d decision, text string) {
	t.mu.Lock()
	defer t.mu.Unlock()
	switch {
	case text != "":
		t.wrote[nameOf(s)] = told{text, time.Now()}
	case d.warning == "":
		delete(t.wrote, nameOf(s))
	}
}

// said reports whether the Service's condition already has the decision's warning, so that an Event has reported it.
func said(s *core.Service, d decision) bool {
	c := assignedCondition(s)
	return c != nil && c.Reason == d.reason && c.Message == d.warning
}

// complain emits Events about unknown and wrong annotations with our prefix, about addresses that the Service keeps but
// could not get now, and about addresses that no node announces.
func (t *term) complain(s *core.Service, d decision) {
	var text string
	if names := unknownAnnotations(s); len(names) > 0 {
		var known []string
		for _, all := range annotations {
			known = append(known, all[0])
		}
		text = fmt.Sprintf("%s has no effect; the annotations are %s", strings.Join(names, ", "),
			strings.Join(known, ", "))
	}
	t.once(s, "UnknownAnnotation", text)
	if text = ""; handled(s) {
		if _, err := settingsOf(s, settings{}); err != nil {
			text = strings.ReplaceAll(err.Error(), "\n", "; ")
		}
	}
	t.once(s, "WrongAnnotation", text)
	text = ""
	if kept := t.assigner.excluded(s); d.warning == "" && len(kept) > 0 {
		text = fmt.Sprintf("the pool of %s no longer permits this Service: see its class, namespaces and "+
			"service_selector; the Service keeps the address until its status.loadBalancer is emptied",
			strings.Join(texts(kept), ", "))
	}
	t.once(s, "PoolExcludesService", text)
	if text = ""; len(d.addrs) > 0 && !d.onNodes {
		text = t.unannounced()
	}
	t.once(s, reasonNotAnnounced, text)
}

// complainExternal emits an Event about externalIPs that no node announces.
func (t *term) complainExternal(s *core.Service) {
	addrs := slices.DeleteFunc(externalIPsOf(s), func(a netip.Addr) bool {
		return permitsExternal(t.assigner.pools, s, a)
	})
	text := ""
	if len(addrs) > 0 && handled(s) {
		text = fmt.Sprintf("%s of spec.externalIPs is not announced: no pool permits it; a [[pool]] that has the "+
			"address and is for this Service needs external_ips = true", strings.Join(texts(addrs), ", "))
	}
	t.once(s, "ExternalIPNotPermitted", text)
}

// once emits an Event unless text is "" or the last Event with this reason had the same text.
func (t *term) once(s *core.Service, reason, text string) {
	text = note(text)
	t.mu.Lock()
	last := t.complaints[nameOf(s)]
	same := last[reason] == text
	switch {
	case same:
	case last == nil:
		t.complaints[nameOf(s)] = map[string]string{reason: text}
	default:
		last[reason] = text
	}
	t.mu.Unlock()
	if !same && text != "" {
		t.events.Event(s, core.EventTypeWarning, reason, text)
	}
}

// Waiting returns the Services of this Source's classes that have no address, with one entry for each of their first
// ports. It may be called from any goroutine.
func (s *Source) Waiting() (all []lb.ServiceStatus) {
	for _, x := range s.services.List() {
		service := x.(*core.Service)
		if !matchesClass(service, s.o.Classes...) || !handled(service) || len(service.Status.LoadBalancer.Ingress) > 0 {
			continue
		}
		reason := "no address is assigned yet"
		if len(*s.pools.Load()) == 0 {
			reason += ", and this node has no [[pool]]"
		}
		if c := assignedCondition(service); c != nil && c.Status == meta.ConditionFalse {
			reason = c.Message
		}
		forward := s.o.Forward
		if isLocal(service) && s.o.SpreadLocal == nil { // delivered to pods on this node
			forward = lb.MethodNAT
		}
		for _, p := range service.Spec.Ports[:min(len(service.Spec.Ports), portsFew)] {
			if port, ok := portOfSpec(p); ok {
				all = append(all, lb.ServiceStatus{
					Service: nameOf(service), Port: port.Port, Protocol: port.Protocol, Policy: policyOf(service),
					Forward: forward, Algorithm: lb.AlgorithmMaglev, Backends: []lb.BackendStatus{},
					State: lb.StateUnknown, Reason: "no address: " + reason,
				})
			}
		}
	}
	slices.SortStableFunc(all, func(a, b lb.ServiceStatus) int { return strings.Compare(a.Service, b.Service) })
	return all
}
