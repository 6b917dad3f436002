package admin

import (
	"errors"
	"fmt"
	"net/http"
	"slices"
	"strings"

	"github.com/steelyard-lb/steelyard/lb"
)

// listServices lists the services, or, with ?scope=inside, the rules of the service proxy.
func (s *Server) listServices(w http.ResponseWriter, r *http.Request) {
	switch scope := lb.Scope(r.URL.Query().Get("scope")); scope {
	case "", lb.ScopeOutside:
		s.respond(func(st lb.Status) any { return s.services(st) })(w, r)
	case lb.ScopeInside:
		if s.o.Rules == nil {
			writeError(w, http.StatusNotFound, errors.New(`this agent is not the service proxy (proxy = "replace")`))
			return
		}
		write(w, http.StatusOK, listOf(s.o.Rules()))
	default:
		writeError(w, http.StatusBadRequest, fmt.Errorf("scope %q: allowed: outside, inside", scope))
	}
}

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
