package table

import (
	"github.com/steelyard-lb/steelyard/datapath/internal/route"
)

// RefreshSources rereads our source addresses towards backends from the kernel. It does not hold the lock while it asks
// the kernel. A change that it misses causes another refresh.
func (s *Services) RefreshSources() {
	s.Mu.Lock()
	hosts := s.Backends.allHosts()
	s.Mu.Unlock()
	finder := &route.SourceFinder{}
	found := finder.FindEach(hosts)
	s.Mu.Lock()
	defer s.Mu.Unlock()
	s.Backends.refresh(finder, found)
}

// Routers returns the routers towards backends. Of several equal paths it returns the one that the kernel selects.
func (s *Services) Routers() (all []route.Router) {
	s.Mu.Lock()
	defer s.Mu.Unlock()
	seen := map[route.Router]bool{}
	for _, b := range s.Backends.ByAddr {
		x := route.Router{NIC: b.NIC, Addr: b.Gateway}
		if !b.local && b.Gateway.IsValid() && !seen[x] {
			seen[x] = true
			all = append(all, x)
		}
	}
	return all
}
