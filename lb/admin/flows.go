package admin

import (
	"context"
	"net/http"

	"github.com/steelyard-lb/steelyard/lb"
)

// Flows is the response of /v1/flows.
type Flows struct {
	Flows []lb.FlowStatus `json:"flows"`
	More  bool            `json:"more"` // there are more than the limit, or the walk was cut short
}

// flowLimit is the number of flows listed if the request has no limit, and the maximum for requests that do not come
// over the socket: listing a million flows takes a gigabyte.
const flowLimit = 1000

// flows lists the flows that the request asks for.
func (s *Server) flows(w http.ResponseWriter, r *http.Request) {
	if want, ok := wantedFlows(w, r); ok {
		s.listFlows(r.Context(), w, want)
	}
}

// someFlows is like flows, but for TCP: one short walk at a time, with at most flowLimit flows.
func (s *Server) someFlows(w http.ResponseWriter, r *http.Request) {
	want, ok := wantedFlows(w, r)
	if !ok {
		return
	}
	if want.Limit == 0 || want.Limit > flowLimit {
		want.Limit = flowLimit
	}
	select {
	case s.walking <- struct{}{}:
		defer func() { <-s.walking }()
	default:
		writeBusy(w, "another request is reading the flows")
		return
	}
	ctx, cancel := context.WithTimeout(r.Context(), walkTime)
	defer cancel()
	s.listFlows(ctx, w, want)
}

// wantedFlows returns a request's filter. It writes the error if the filter is not valid.
func wantedFlows(w http.ResponseWriter, r *http.Request) (want lb.FlowFilter, ok bool) {
	want.Limit = flowLimit
	for name, values := range r.URL.Query() {
		for _, v := range values {
			if err := want.Set(name, v); err != nil {
				writeError(w, http.StatusBadRequest, err)
				return want, false
			}
		}
	}
	return want, true
}

func (s *Server) listFlows(ctx context.Context, w http.ResponseWriter, want lb.FlowFilter) {
	flows, more, err := s.o.Flows(ctx, want)
	if err != nil {
		writeError(w, http.StatusInternalServerError, err)
		return
	}
	if len(flows) == 0 && !more && want.Service != "" {
		if err := s.noService(ctx, want.Service); err != nil {
			writeError(w, http.StatusNotFound, err)
			return
		}
	}
	write(w, http.StatusOK, Flows{listOf(flows), more})
}

// noService returns an error if there is no such service, or nil if it exists or if the engine cannot tell.
func (s *Server) noService(ctx context.Context, name string) error {
	ctx, cancel := context.WithTimeout(ctx, engineTimeout)
	defer cancel()
	st, err := s.o.Status(ctx)
	if err != nil || !st.Settled {
		return nil
	}
	return lb.NoService(name, s.services(st))
}
