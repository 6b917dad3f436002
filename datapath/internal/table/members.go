package table

import (
	"fmt"
	"net/netip"

	"github.com/cilium/ebpf"

	"github.com/steelyard-lb/steelyard/datapath/internal/bpf"
	"github.com/steelyard-lb/steelyard/lb"
)

// frontendEntries maintains each frontend's entries in two maps that all frontends share: allowed sources, and weights
// of backends. New entries are added before the frontend refers to them, and stale ones are removed afterwards.
type frontendEntries struct {
	objects *bpf.Objects
	allowed map[uint32]map[bpf.AllowKey]bool    // by frontend id
	members map[uint32]map[bpf.MemberKey]uint32 // values by frontend id
	epochs  map[uint32]uint32                   // for the next new member, by frontend id
	used    lb.Places                           // number of entries, in Sources and Weights
}

// memberWeightBits is the number of weight bits in a member's value (bpf/types.h).
const memberWeightBits = 12

// openFrontendEntries reads a previous agent's entries.
func openFrontendEntries(o *bpf.Objects) (*frontendEntries, error) {
	s := &frontendEntries{objects: o, allowed: map[uint32]map[bpf.AllowKey]bool{},
		members: map[uint32]map[bpf.MemberKey]uint32{}, epochs: map[uint32]uint32{}}
	var ak bpf.AllowKey
	var mk bpf.MemberKey
	var n uint32
	allowed := o.SySrcAllow.Iterate()
	for allowed.Next(&ak, &n) {
		s.allowedOf(bpf.Swap32(ak.Frontend))[ak] = true
		s.used.Sources++
	}
	members := o.SyWeights.Iterate()
	for members.Next(&mk, &n) {
		s.membersOf(mk.Frontend)[mk] = n
		s.used.Weights++
		s.epochs[mk.Frontend] = max(s.epochs[mk.Frontend], n>>memberWeightBits+1)
	}
	for _, it := range []*ebpf.MapIterator{allowed, members} {
		if err := it.Err(); err != nil {
			return nil, fmt.Errorf("read allowed sources and weights: %w", err)
		}
	}
	return s, nil
}

func (s *frontendEntries) allowedOf(id uint32) map[bpf.AllowKey]bool {
	if s.allowed[id] == nil {
		s.allowed[id] = map[bpf.AllowKey]bool{}
	}
	return s.allowed[id]
}

func (s *frontendEntries) membersOf(id uint32) map[bpf.MemberKey]uint32 {
	if s.members[id] == nil {
		s.members[id] = map[bpf.MemberKey]uint32{}
	}
	return s.members[id]
}

// add adds p's missing entries.
func (s *frontendEntries) add(id uint32, p *lb.FrontendPlan, backends []uint32) error {
	for k := range allowedKeys(id, p) {
		if s.allowedOf(id)[k] {
			continue
		}
		if err := s.objects.SySrcAllow.Put(k, uint32(1)); err != nil {
			return fmt.Errorf("allow a source: %w", err)
		}
		s.allowedOf(id)[k] = true
		s.used.Sources++
	}
	for k, weight := range memberWeights(id, p, backends) {
		was, known := s.membersOf(id)[k]
		epoch := was >> memberWeightBits
		if !known {
			epoch = s.epochs[id]
		}
		value := epoch<<memberWeightBits | weight
		if known && was == value {
			continue
		}
		if err := s.objects.SyWeights.Put(k, value); err != nil {
			return fmt.Errorf("put the weight of a backend: %w", err)
		}
		s.membersOf(id)[k] = value
		if !known {
			s.used.Weights++
		}
	}
	return nil
}

// trim removes all entries but p's, or all if p is nil.
func (s *frontendEntries) trim(id uint32, p *lb.FrontendPlan, backends []uint32) error {
	var allowed map[bpf.AllowKey]bool
	var members map[bpf.MemberKey]uint32
	if p != nil {
		allowed, members = allowedKeys(id, p), memberWeights(id, p, backends)
	}
	for k := range s.allowed[id] {
		if allowed[k] {
			continue
		}
		if err := IgnoreMissing(s.objects.SySrcAllow.Delete(k)); err != nil {
			return fmt.Errorf("remove an allowed source: %w", err)
		}
		delete(s.allowed[id], k)
		s.used.Sources--
	}
	for k, value := range s.members[id] {
		if _, ok := members[k]; ok {
			continue
		}
		if err := IgnoreMissing(s.objects.SyWeights.Delete(k)); err != nil {
			return fmt.Errorf("remove the weight of a backend: %w", err)
		}
		delete(s.members[id], k)
		s.used.Weights--
		s.epochs[id] = max(s.epochs[id], value>>memberWeightBits+1) & (1<<(32-memberWeightBits) - 1)
	}
	if p == nil {
		delete(s.allowed, id)
		delete(s.members, id)
	}
	return nil
}

func allowedKeys(id uint32, plan *lb.FrontendPlan) map[bpf.AllowKey]bool {
	keys := map[bpf.AllowKey]bool{}
	for _, p := range plan.Allow {
		if p.Addr().Is4() == plan.VIP.Is4() { // ::/0 would match IPv4-mapped addresses
			keys[bpf.ToAllowKey(id, p)] = true
		}
	}
	return keys
}

// memberWeights returns the weights that the programs look up.
func memberWeights(id uint32, p *lb.FrontendPlan, backends []uint32) map[bpf.MemberKey]uint32 {
	if !p.HasWeights() {
		return nil
	}
	weights := map[bpf.MemberKey]uint32{}
	for i, t := range p.Targets {
		weights[bpf.MemberKey{Frontend: id, Backend: backends[i]}] = uint32(min(t.Weight, 1<<memberWeightBits-1))
	}
	return weights
}

func (s *Services) SetMembers(members []netip.Prefix) { s.Backends.members = members }
