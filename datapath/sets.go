package datapath

import (
	"fmt"

	"github.com/cilium/ebpf"

	"github.com/steelyard-lb/steelyard/lb"
)

// frontendSets keeps the entries that a frontend has in maps shared by all: sources that it allows, and the weights of its
// backends. What is new is added before the frontend asks for it, what is stale is removed after.
type frontendSets struct {
	objects *syObjects
	allowed map[uint32]map[syAllowKey]bool    // by frontend id
	members map[uint32]map[syMemberKey]uint32 // weight, by frontend id
}

// openSets reads back what an earlier agent left.
func openSets(o *syObjects) (*frontendSets, error) {
	s := &frontendSets{objects: o, allowed: map[uint32]map[syAllowKey]bool{}, members: map[uint32]map[syMemberKey]uint32{}}
	var ak syAllowKey
	var mk syMemberKey
	var n uint32
	allowed := o.SySrcAllow.Iterate()
	for allowed.Next(&ak, &n) {
		s.allowedOf(swap32(ak.Frontend))[ak] = true
	}
	members := o.SyWeights.Iterate()
	for members.Next(&mk, &n) {
		s.membersOf(mk.Frontend)[mk] = n
	}
	for _, it := range []*ebpf.MapIterator{allowed, members} {
		if err := it.Err(); err != nil {
			return nil, fmt.Errorf("read what belongs to frontends: %w", err)
		}
	}
	return s, nil
}

func (s *frontendSets) allowedOf(id uint32) map[syAllowKey]bool {
	if s.allowed[id] == nil {
		s.allowed[id] = map[syAllowKey]bool{}
	}
	return s.allowed[id]
}

func (s *frontendSets) membersOf(id uint32) map[syMemberKey]uint32 {
	if s.members[id] == nil {
		s.members[id] = map[syMemberKey]uint32{}
	}
	return s.members[id]
}

// add puts what p needs and is not there.
func (s *frontendSets) add(id uint32, p *lb.FrontendPlan, backends []uint32) error {
	for k := range allowedKeys(id, p) {
		if s.allowedOf(id)[k] {
			continue
		}
		if err := s.objects.SySrcAllow.Put(k, uint32(1)); err != nil {
			return fmt.Errorf("allow a source: %w", err)
		}
		s.allowedOf(id)[k] = true
	}
	for k, weight := range memberWeights(id, p, backends) {
		if s.membersOf(id)[k] == weight {
			continue
		}
		if err := s.objects.SyWeights.Put(k, weight); err != nil {
			return fmt.Errorf("put the weight of a backend: %w", err)
		}
		s.membersOf(id)[k] = weight
	}
	return nil
}

// trim removes what p does not need; a nil p needs nothing.
func (s *frontendSets) trim(id uint32, p *lb.FrontendPlan, backends []uint32) error {
	var allowed map[syAllowKey]bool
	var members map[syMemberKey]uint32
	if p != nil {
		allowed, members = allowedKeys(id, p), memberWeights(id, p, backends)
	}
	for k := range s.allowed[id] {
		if allowed[k] {
			continue
		}
		if err := ignoreMissing(s.objects.SySrcAllow.Delete(k)); err != nil {
			return fmt.Errorf("remove an allowed source: %w", err)
		}
		delete(s.allowed[id], k)
	}
	for k := range s.members[id] {
		if _, ok := members[k]; ok {
			continue
		}
		if err := ignoreMissing(s.objects.SyWeights.Delete(k)); err != nil {
			return fmt.Errorf("remove the weight of a backend: %w", err)
		}
		delete(s.members[id], k)
	}
	if p == nil {
		delete(s.allowed, id)
		delete(s.members, id)
	}
	return nil
}

func allowedKeys(id uint32, plan *lb.FrontendPlan) map[syAllowKey]bool {
	keys := map[syAllowKey]bool{}
	for _, p := range plan.Allow {
		if p.Addr().Is4() == plan.VIP.Is4() { // ::/0 has the mapped addresses of IPv4, too
			keys[toAllowKey(id, p)] = true
		}
	}
	return keys
}

// memberWeights returns the weights that the programs ask for; most frontends have none there.
func memberWeights(id uint32, p *lb.FrontendPlan, backends []uint32) map[syMemberKey]uint32 {
	if p.Affinity == 0 && p.Algorithm != lb.AlgorithmLeastConnections {
		return nil
	}
	weights := map[syMemberKey]uint32{}
	for i, t := range p.Targets {
		weights[syMemberKey{Frontend: id, Backend: backends[i]}] = uint32(t.Weight)
	}
	return weights
}
