package datapath

import "github.com/steelyard-lb/steelyard/datapath/internal/route"

// refreshSources reads our source addresses towards backends from the kernel again. The lock is not held meanwhile. A
// change that is missed in between causes another refresh.
func (s *services) refreshSources() {
	s.mu.Lock()
	hosts := s.backends.allHosts()
	s.mu.Unlock()
	finder := &route.SourceFinder{}
	found := finder.FindEach(hosts)
	s.mu.Lock()
	defer s.mu.Unlock()
	s.backends.refresh(finder, found)
}

// routers returns the routers towards backends, and for equal paths those that the kernel selects.
func (s *services) routers() (all []route.Router) {
	s.mu.Lock()
	defer s.mu.Unlock()
	seen := map[route.Router]bool{}
	for _, b := range s.backends.byAddr {
		x := route.Router{NIC: b.NIC, Addr: b.Gateway}
		if !b.local && b.Gateway.IsValid() && !seen[x] {
			seen[x] = true
			all = append(all, x)
		}
	}
	return all
}
