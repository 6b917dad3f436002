package admin

import (
	"net/http"

	"github.com/steelyard-lb/steelyard/lb"
)

// listMembers lists the other members of [l2].
func (s *Server) listMembers(w http.ResponseWriter, _ *http.Request) {
	var all []lb.MemberStatus
	if s.o.Members != nil {
		all = s.o.Members()
	}
	write(w, http.StatusOK, listOf(all))
}
