package admin

import (
	"slices"
	"strings"

	"github.com/steelyard-lb/steelyard/lb"
)

// services returns the rows of all services by name, including those without an address and those with refused
// addresses. The rows of one service keep their order.
func (s *Server) services(st lb.Status) []lb.ServiceStatus {
	all := st.Services
	if s.o.Waiting != nil {
		all = slices.Concat(all, s.o.Waiting())
	}
	slices.SortStableFunc(all, func(a, b lb.ServiceStatus) int { return strings.Compare(a.Service, b.Service) })
	return listOf(all)
}
