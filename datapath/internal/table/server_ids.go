package table

import (
	"fmt"
	"net/netip"

	"github.com/cilium/ebpf"

	"github.com/steelyard-lb/steelyard/datapath/internal/bpf"
)

// freeIDs returns the ids below size that are not in used. Callers take the last one first, and append ids that are
// free again.
func freeIDs[V any](size uint32, used map[uint32]V) []uint32 {
	free := make([]uint32, 0, size)
	for id := size; id > 0; id-- {
		if _, ok := used[id-1]; !ok {
			free = append(free, id-1)
		}
	}
	return free
}

// serverIDs maintains the ids of backend addresses. The programs look up a packet as a reply only if its source has an
// id.
type serverIDs struct {
	servers *ebpf.Map
	ids     map[netip.Addr]uint32
	free    []uint32
}

// openServerIDs reads the ids that a previous agent assigned.
func openServerIDs(servers *ebpf.Map) (*serverIDs, error) {
	s := &serverIDs{servers: servers, ids: map[netip.Addr]uint32{}}
	var addr bpf.Addr
	var id uint32
	used := map[uint32]bool{}
	all := servers.Iterate()
	for all.Next(&addr, &id) {
		s.ids[bpf.FromAddr(addr)], used[id] = id, true
	}
	s.free = freeIDs(maxBackends, used)
	if err := all.Err(); err != nil {
		return nil, fmt.Errorf("read the ids of servers: %w", err)
	}
	return s, nil
}

// get returns the id of an address, and assigns one if needed.
func (s *serverIDs) get(addr netip.Addr) (uint32, error) {
	if id, ok := s.ids[addr]; ok {
		return id, nil
	}
	last := len(s.free) - 1
	if last < 0 {
		return 0, fmt.Errorf("no id is free for server %s (%d are in use)", addr, maxBackends)
	}
	id := s.free[last]
	if err := s.servers.Put(bpf.ToAddr(addr), id); err != nil {
		return 0, fmt.Errorf("put server %s: %w", addr, err)
	}
	s.free, s.ids[addr] = s.free[:last], id
	return id, nil
}

// release frees the id of an address that no backend or flow has.
func (s *serverIDs) release(addr netip.Addr) error {
	id, ok := s.ids[addr]
	if !ok {
		return nil
	}
	if err := IgnoreMissing(s.servers.Delete(bpf.ToAddr(addr))); err != nil {
		return fmt.Errorf("remove server %s: %w", addr, err)
	}
	delete(s.ids, addr)
	s.free = append(s.free, id)
	return nil
}
