package admin

import (
	"context"
	"net/http"

	"github.com/steelyard-lb/steelyard/lb"
)

// Flows is the response of /v1/flows.
type Flows struct {
	Flows []lb.FlowStatus `json:"flows"`
	More  bool            `json:"more"` // there are more than the limit
}

// flowLimit is the limit of the listed flows when the request has none, and of all requests that are not by the socket:
// the answer with a million flows takes a gigabyte.
const flowLimit = 1000

// flows returns a handler that lists at most so many flows; 0: as many as the request wants.
func (s *Server) flows(most int) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		want := lb.FlowFilter{Limit: flowLimit}
		for name, values := range r.URL.Query() {
			for _, v := range values {
				if err := want.Set(name, v); err != nil {
					writeError(w, http.StatusBadRequest, err)
					return
				}
			}
		}
		if most > 0 && (want.Limit == 0 || want.Limit > most) {
			want.Limit = most
		}
		s.listFlows(w, r, want)
	}
}

func (s *Server) listFlows(w http.ResponseWriter, r *http.Request, want lb.FlowFilter) {
	flows, more, err := s.o.Flows(r.Context(), want)
	if err != nil {
		writeError(w, http.StatusInternalServerError, err)
		return
	}
	if len(flows) == 0 && want.Service != "" {
		if err := s.noService(r.Context(), want.Service); err != nil {
			writeError(w, http.StatusNotFound, err)
			return
		}
	}
	write(w, http.StatusOK, Flows{listOf(flows), more})
}

// noService returns the error that there is no such service; nil: there is, or that is not known now.
func (s *Server) noService(ctx context.Context, name string) error {
	ctx, cancel := context.WithTimeout(ctx, engineTimeout)
	defer cancel()
	st, err := s.o.Status(ctx)
	if err != nil || !st.Settled {
		return nil
	}
	return lb.NoService(name, s.services(st))
}
