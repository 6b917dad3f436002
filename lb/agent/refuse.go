package agent

import (
	"context"
	"log/slog"
	"maps"
	"net/netip"
	"slices"
	"sync"

	"github.com/steelyard-lb/steelyard/lb"
	"github.com/steelyard-lb/steelyard/lb/agent/machine"
)

// refuser sits between the sources and the engine. It removes from services the addresses that belong to this machine,
// to its network, or to another node, and follows changes of the machine. The datapath takes every packet to a VIP, so
// such an address would be unusable for everything else.
type refuser struct {
	lb.Sink
	log      *slog.Logger
	boundary *lb.Boundary // surrounds the handling of kernel notifications

	mu       sync.Mutex // guards all below; held during calls to Sink, to keep their order
	network  *machine.Network
	nodes    map[netip.Addr]bool    // addresses of the nodes of the cluster
	services map[string]*lb.Service // as put by the sources
	refused  map[string][]lb.RefusedVIP
}

func newRefuser(to lb.Sink, n *machine.Network, b *lb.Boundary, log *slog.Logger) *refuser {
	return &refuser{
		Sink: to, network: n, boundary: b, log: log,
		services: map[string]*lb.Service{}, refused: map[string][]lb.RefusedVIP{},
	}
}

// Put implements lb.Sink.
func (r *refuser) Put(s *lb.Service) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.services[s.Name] = s
	r.put(s)
}

// put passes on a service without the addresses that it cannot have; r.mu is held.
func (r *refuser) put(s *lb.Service) {
	checked := s.Refuse(r.taken)
	for _, x := range checked.Refused {
		if !slices.Contains(r.refused[s.Name], x) {
			r.log.Error("address refused", "service", s.Name, "vip", x.VIP, "reason", x.Reason)
		}
	}
	r.refused[s.Name] = checked.Refused
	if len(checked.Refused) == 0 {
		delete(r.refused, s.Name)
	}
	r.Sink.Put(checked)
}

// Delete implements lb.Sink.
func (r *refuser) Delete(name string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	delete(r.services, name)
	delete(r.refused, name)
	r.Sink.Delete(name)
}

// taken says why a service cannot have an address, or returns ""; r.mu is held.
func (r *refuser) taken(a netip.Addr) string {
	if what := r.network.Taken(a); what != "" {
		return what
	}
	if r.nodes[a] {
		return "the address of a node"
	}
	return ""
}

// setNodes sets the addresses of the nodes of the cluster.
func (r *refuser) setNodes(nodes []netip.Addr) {
	r.mu.Lock()
	defer r.mu.Unlock()
	next := map[netip.Addr]bool{}
	for _, a := range nodes {
		next[a] = true
	}
	if !maps.Equal(r.nodes, next) {
		r.nodes = next
		r.again()
	}
}

// watch follows the addresses of the machine until ctx ends.
func (r *refuser) watch(ctx context.Context) error {
	machine.Watch(ctx, r.network, r.boundary, r.log, func(n *machine.Network) {
		r.mu.Lock()
		defer r.mu.Unlock()
		r.network = n
		r.again()
	})
	return nil
}

// again puts the services whose refused addresses have changed; r.mu is held.
func (r *refuser) again() {
	for name, s := range r.services {
		if !slices.Equal(s.Refuse(r.taken).Refused, r.refused[name]) {
			r.put(s)
		}
	}
}
