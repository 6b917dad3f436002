package kube

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"time"

	core "k8s.io/api/core/v1"
	meta "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/steelyard-lb/steelyard/lb"
)

// If a new cluster lacks pools, announcers, or a node that is not excluded, no Service works, and each Service and each
// node's status says so. In clusters that consist only of control plane nodes, all nodes are excluded.

// othersTime is how long a Service without an address is left to another controller while there are no pools, or
// because its class is not ours.
const othersTime = time.Minute

const (
	textNoPool      = "Steelyard's configuration has no [[pool]]"
	textNoAnnouncer = "no node announces it: Steelyard's configuration has neither [bgp] nor [l2]"
	textOthers      = "two controllers assign addresses: disable one, or give each a load balancer class"
	textNoAgent     = "no Steelyard agent serves %s: see load_balancer_class in [kubernetes]"
	textNotReady    = "no node announces it: none of the DaemonSet's %d pods is ready; see " +
		"kubectl -n %s describe pods; a node may lack a bpffs (mount -t bpf bpf /sys/fs/bpf)"
	textExcluded = "no node announces it: %s the label " + labelExclude +
		"; remove it from one, or set ignore_exclude_label = true in [kubernetes]"
)

// excludedNodes says that all n nodes have the label.
func excludedNodes(n int) string {
	have := fmt.Sprintf("all %d nodes have", n)
	if n == 1 {
		have = "the only node has"
	}
	return fmt.Sprintf(textExcluded, have)
}

// avoidClusterIPs takes the cluster's ranges of ClusterIPs out of the pools, because service proxies would confuse such
// an address with the ClusterIP of another Service.
func (t *term) avoidClusterIPs(ctx context.Context) {
	list, err := t.o.Client.NetworkingV1().ServiceCIDRs().List(ctx, meta.ListOptions{})
	if err != nil { // they exist since Kubernetes 1.33, and an older manifest does not permit reading them
		t.o.Log.Info("ranges of ClusterIPs not known", "err", err)
		return
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	pools := slices.Clone(t.assigner.pools)
	for _, c := range list.Items {
		for _, text := range c.Spec.CIDRs {
			cidr, _ := rangeOf(text) // the API server validates it
			for i, p := range pools {
				pools[i].Ranges = nil
				for _, r := range p.Ranges {
					pools[i].Ranges = append(pools[i].Ranges, r.Without(cidr)...)
				}
				if !slices.Equal(pools[i].Ranges, p.Ranges) {
					t.o.Log.Warn("pool contains ClusterIPs, which are not assigned", "pool", p.Name, "range", text)
				}
			}
		}
	}
	next := newAssigner(t.o.Classes, pools)
	t.assigner.pools, t.assigner.alloc = next.pools, next.alloc
}

// isOfOthers reports whether a Service is left to another controller that assigns addresses, because there are no
// pools.
func (t *term) isOfOthers(s *core.Service) bool {
	if len(t.assigner.pools) > 0 {
		return false
	}
	if len(s.Status.LoadBalancer.Ingress) > 0 {
		return !isOurs(s)
	}
	left := time.Until(s.CreationTimestamp.Add(othersTime))
	if left > 0 {
		t.queue.AddAfter(nameOf(s), left)
	}
	return left > 0
}

// waitsLong reports whether a Service has waited for an address for othersTime.
func waitsLong(s *core.Service) bool {
	return len(s.Status.LoadBalancer.Ingress) == 0 && time.Since(s.CreationTimestamp.Time) > othersTime
}

// noAgent says that no agent assigns an address to a Service whose class is not one of these, or returns "".
func noAgent(s *core.Service, classes []string) string {
	switch {
	case !isOfOtherClass(s, classes) || !waitsLong(s) || assignedCondition(s) != nil || !handled(s):
		return ""
	case classOf(s) == "":
		return fmt.Sprintf(textNoAgent, "Services without a class")
	}
	return fmt.Sprintf(textNoAgent, fmt.Sprintf("the class %q", classOf(s)))
}

// complainClass emits an Event about a class that no agent serves.
func (t *term) complainClass(s *core.Service) {
	if left := time.Until(s.CreationTimestamp.Add(othersTime)); left > 0 && isOfOtherClass(s, t.o.Classes) {
		t.queue.AddAfter(nameOf(s), left)
	}
	t.once(s, "NoAgentForClass", noAgent(s, t.o.Classes))
}

// unannounced says why no node announces any Service, or returns "" if one may.
func (t *term) unannounced() string {
	t.mu.Lock()
	defer t.mu.Unlock()
	switch unready := t.unready.Load(); {
	case t.o.NoAnnouncer:
		return textNoAnnouncer
	case unready > 0:
		return fmt.Sprintf(textNotReady, unready, t.o.Namespace)
	case t.assigner.nodes == 0 && t.excluded > 0:
		return excludedNodes(t.excluded)
	}
	return ""
}

// The name of the agents' DaemonSet in the manifest, and how often the allocator reads it. A rollout takes less time.
const (
	agentsName  = "steelyard"
	agentsEvery = 30 * time.Second
)

// followAgents records how many pods the DaemonSet has if none was ready twice in a row, because an agent that does not
// start cannot report that.
func (a *Allocator) followAgents(ctx context.Context) {
	for before := int64(0); sleep(ctx, agentsEvery); {
		d, err := a.o.Client.AppsV1().DaemonSets(a.o.Namespace).Get(ctx, agentsName, meta.GetOptions{})
		unready := int64(0)
		if err == nil && d.Status.NumberReady == 0 {
			unready = int64(d.Status.DesiredNumberScheduled)
		}
		if now := min(before, unready); a.unready.Swap(now) != now {
			a.mu.Lock()
			if a.term != nil {
				a.term.locked(func() { a.term.queueAll() })
			}
			a.mu.Unlock()
		}
		before = unready
	}
}

// allExcluded returns the number of nodes in the cluster if all have the label that excludes them, or 0 if one does
// not.
func (s *Source) allExcluded() int {
	if s.o.IgnoreExclude {
		return 0
	}
	all := s.nodes.List()
	for _, n := range all {
		if !hasExcludeLabel(n.(*core.Node)) {
			return 0
		}
	}
	return len(all)
}

// Findings reports what is missing for any Service to work, and nodes that do not answer. It may be called from any
// goroutine.
func (s *Source) Findings() (all []lb.Finding) {
	services, waiting, unserved := 0, 0, map[string]int{}
	for _, x := range s.services.List() {
		service := x.(*core.Service)
		if !matchesClass(service, s.o.Classes...) || !handled(service) {
			if text := noAgent(service, s.o.Classes); text != "" {
				unserved[text]++
			}
			continue
		}
		services++
		if waitsLong(service) {
			waiting++
		}
	}
	for _, text := range slices.Sorted(maps.Keys(unserved)) {
		all = append(all, lb.FoundNoAgentForClass.About("", "%d Services have no address: %s", unserved[text], text))
	}
	switch excluded := s.excluded.Load(); {
	case services == 0:
	case len(*s.pools.Load()) == 0 && waiting > 0:
		all = append(all, lb.FoundNoPool.About("", "%d Services have no address: %s", waiting, textNoPool))
	case s.o.NoAnnouncer && needAnnouncer(*s.pools.Load()):
		all = append(all, lb.FoundNoAnnouncer.About("", "%d Services: %s", services, textNoAnnouncer))
	case excluded > 0:
		all = append(all, lb.FoundAllExcluded.About("", "%d Services: %s", services, excludedNodes(int(excluded))))
	}
	return append(all, s.unanswering()...)
}
