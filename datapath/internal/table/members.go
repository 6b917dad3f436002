package table

import (
	"errors"
	"fmt"
	"net/netip"

	"github.com/cilium/ebpf"

	"github.com/steelyard-lb/steelyard/datapath/internal/bpf"
	"github.com/steelyard-lb/steelyard/lb"
)

// entries maintains the entries of a map in the kernel, by frontend id or another owner.
type entries[K comparable] struct {
	m  *ebpf.Map
	of map[uint32]map[K]uint32 // values by owner
	n  int                     // number of entries
}

// openEntries reads a previous agent's entries.
func openEntries[K comparable](m *ebpf.Map, owner func(K) uint32) (*entries[K], error) {
	e := &entries[K]{m: m, of: map[uint32]map[K]uint32{}}
	var k K
	var value uint32
	all := m.Iterate()
	for all.Next(&k, &value) {
		e.note(owner(k), k, value)
	}
	if err := all.Err(); err != nil {
		return nil, fmt.Errorf("read %v: %w", m, err)
	}
	return e, nil
}

func (e *entries[K]) note(owner uint32, k K, value uint32) {
	if e.of[owner] == nil {
		e.of[owner] = map[K]uint32{}
	}
	if _, known := e.of[owner][k]; !known {
		e.n++
	}
	e.of[owner][k] = value
}

// add writes the entries in want that differ.
func (e *entries[K]) add(owner uint32, want map[K]uint32) error {
	for k, value := range want {
		if was, known := e.of[owner][k]; known && was == value {
			continue
		}
		if err := e.m.Put(k, value); err != nil {
			return fmt.Errorf("put an entry into %v: %w", e.m, err)
		}
		e.note(owner, k, value)
	}
	return nil
}

// trim removes the owner's entries that are not in want.
func (e *entries[K]) trim(owner uint32, want map[K]uint32) error {
	for k := range e.of[owner] {
		if _, ok := want[k]; ok {
			continue
		}
		if err := IgnoreMissing(e.m.Delete(k)); err != nil {
			return fmt.Errorf("remove an entry from %v: %w", e.m, err)
		}
		delete(e.of[owner], k)
		e.n--
	}
	if len(want) == 0 {
		delete(e.of, owner)
	}
	return nil
}

func (e *entries[K]) replace(owner uint32, want map[K]uint32) error {
	if err := e.add(owner, want); err != nil {
		return err
	}
	return e.trim(owner, want)
}

// frontendEntries maintains each frontend's entries in two maps that all frontends share: allowed sources, and weights
// of backends. New entries are added before the frontend refers to them, and stale ones are removed afterwards.
type frontendEntries struct {
	allowed *entries[bpf.AllowKey]
	members *entries[bpf.MemberKey]
	epoch   uint32 // for the next new member; it changes when members leave
}

// memberWeightBits is the number of weight bits in a member's value (bpf/types.h).
const memberWeightBits = 12

func openFrontendEntries(o *bpf.Objects) (s *frontendEntries, err error) {
	s = &frontendEntries{}
	s.allowed, err = openEntries(o.SySrcAllow, func(k bpf.AllowKey) uint32 { return bpf.Swap32(k.Frontend) })
	if err != nil {
		return nil, err
	}
	if s.members, err = openEntries(o.SyWeights, func(k bpf.MemberKey) uint32 { return k.Frontend }); err != nil {
		return nil, err
	}
	for _, members := range s.members.of {
		for _, value := range members {
			s.epoch = max(s.epoch, value>>memberWeightBits+1)
		}
	}
	return s, nil
}

// add adds p's missing entries.
func (s *frontendEntries) add(id uint32, p *lb.FrontendPlan, backends []uint32) error {
	return errors.Join(s.allowed.add(id, allowedKeys(id, p)), s.members.add(id, s.values(id, p, backends)))
}

// trim removes all entries but p's, or all if p is nil.
func (s *frontendEntries) trim(id uint32, p *lb.FrontendPlan, backends []uint32) error {
	had := s.members.n
	err := errors.Join(s.allowed.trim(id, allowedKeys(id, p)), s.members.trim(id, s.values(id, p, backends)))
	if s.members.n < had {
		s.epoch = (s.epoch + 1) % (1 << (32 - memberWeightBits))
	}
	return err
}

func allowedKeys(id uint32, plan *lb.FrontendPlan) map[bpf.AllowKey]uint32 {
	keys := map[bpf.AllowKey]uint32{}
	if plan == nil {
		return keys
	}
	for _, p := range plan.Allow {
		if p.Addr().Is4() == plan.VIP.Is4() { // ::/0 would match IPv4-mapped addresses
			keys[bpf.ToAllowKey(id, p)] = 1
		}
	}
	return keys
}

// values returns the entries of the members that the programs look up.
func (s *frontendEntries) values(id uint32, p *lb.FrontendPlan, backends []uint32) map[bpf.MemberKey]uint32 {
	if p == nil || !p.HasWeights() {
		return nil
	}
	values := map[bpf.MemberKey]uint32{}
	for i, t := range p.Targets {
		k, epoch := bpf.MemberKey{Frontend: id, Backend: backends[i]}, s.epoch
		if was, known := s.members.of[id][k]; known {
			epoch = was >> memberWeightBits
		}
		values[k] = epoch<<memberWeightBits | uint32(min(t.Weight, 1<<memberWeightBits-1))
	}
	return values
}

// ServeSelf delivers packets for backends at addresses of this machine to its stack. Call it before Put.
func (s *Services) ServeSelf() { s.Backends.servesSelf = true }

func (s *Services) SetMembers(members []netip.Prefix) { s.Backends.members = members }
