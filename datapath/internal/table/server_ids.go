package table

import (
	"fmt"
	"net/netip"

	"github.com/cilium/ebpf"

	"github.com/steelyard-lb/steelyard/datapath/internal/bpf"
)

// maxServers is the number of server ids, which have 24 bits in the keys of flows (bpf/flow.h, server_id).
const maxServers = 1 << 24

// serverIDs maintains the ids of backend addresses. The programs look up a packet as a reply only if its source has an
// id.
type serverIDs struct {
	servers *ebpf.Map
	ids     map[netip.Addr]uint32
	next    uint32
	free    []uint32 // ids below next
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
		s.next = max(s.next, id+1)
	}
	for id := range s.next {
		if !used[id] {
			s.free = append(s.free, id)
		}
	}
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
	id, n := s.next, len(s.free)
	if n > 0 {
		id = s.free[n-1]
	} else if id == maxServers {
		return 0, fmt.Errorf("no id is free for server %s (%d are in use)", addr, maxServers)
	}
	if err := s.servers.Put(bpf.ToAddr(addr), id); err != nil {
		return 0, fmt.Errorf("put server %s: %w", addr, err)
	}
	if n > 0 {
		s.free = s.free[:n-1]
	} else {
		s.next++
	}
	s.ids[addr] = id
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
