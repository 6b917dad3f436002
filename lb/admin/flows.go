package admin

import (
	"context"
	"errors"
	"net/http"
	"slices"
	"strings"

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

// flowsOver returns the handler of requests for flows over the unix socket, or over TCP.
func (s *Server) flowsOver(unix bool) http.HandlerFunc {
	if unix {
		return s.flows
	}
	return s.someFlows
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

// EndedFlows is the response of /v1/flows/end.
type EndedFlows struct {
	Ended int `json:"ended"`
	Kept  int `json:"kept"` // with direct return (dsr, tunnel)
}

// endFlows ends the flows that the request selects. Without a filter, it refuses to end all.
func (s *Server) endFlows(w http.ResponseWriter, r *http.Request) {
	want, ok := wantedFlows(w, r)
	if !ok {
		return
	}
	want.Limit = 0
	if want == (lb.FlowFilter{State: want.State, Port: want.Port}) {
		writeError(w, http.StatusBadRequest, errors.New("want client=ADDRESS, service=NAME or backend=ADDRESS"))
		return
	}
	var done EndedFlows
	var err error
	if done.Ended, done.Kept, err = s.o.EndFlows(r.Context(), want); err != nil {
		writeError(w, http.StatusInternalServerError, err)
		return
	}
	if done == (EndedFlows{}) && want.Service != "" {
		if err := s.noService(r.Context(), want.Service); err != nil {
			writeError(w, http.StatusNotFound, err)
			return
		}
	}
	s.o.Log.Info("flows ended by the operator", "flows", done.Ended, "kept", done.Kept)
	write(w, http.StatusOK, done)
}

// noService returns an error if there is no such service, or nil if it exists or if the engine cannot tell.
func (s *Server) noService(ctx context.Context, name string) error {
	ctx, cancel := context.WithTimeout(ctx, engineTimeout)
	defer cancel()
	st, err := s.o.Status(ctx)
	if err != nil || !st.Settled {
		return nil
	}
	rows := slices.Clone(s.services(st))
	if s.o.Rules != nil {
		for _, r := range s.o.Rules() {
			service, _, _ := strings.Cut(r.Name, ":")
			rows = append(rows, lb.ServiceStatus{Service: service})
		}
	}
	return lb.NoService(name, rows)
}
