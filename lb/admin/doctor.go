package admin

import (
	"context"
	"errors"
	"net/http"
)

// examine runs the checks of "steelyard doctor". A request waits for an earlier one to end.
func (s *Server) examine(w http.ResponseWriter, r *http.Request) {
	if s.o.Examine == nil {
		writeError(w, http.StatusUnprocessableEntity, errors.New("the agent has not started yet"))
		return
	}
	select {
	case s.examining <- struct{}{}:
		defer func() { <-s.examining }()
	case <-r.Context().Done():
		return
	}
	ctx, cancel := context.WithTimeout(r.Context(), engineTimeout)
	defer cancel()
	st, err := s.o.Status(ctx)
	if err != nil {
		writeError(w, http.StatusServiceUnavailable, err)
		return
	}
	write(w, http.StatusOK, s.o.Examine(r.Context(), st))
}
