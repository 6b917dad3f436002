package admin

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"slices"
	"time"

	"github.com/steelyard-lb/steelyard/lb"
)

// traceTimeout ends the trace of a reader that does not read, such as a pager.
const traceTimeout = time.Minute

// trace streams packets as server-sent events, until the reader has gone.
func (s *Server) trace(w http.ResponseWriter, r *http.Request) {
	var f lb.TraceFilter
	for name, values := range r.URL.Query() {
		for _, value := range values {
			if err := f.Set(name, value); err != nil {
				writeError(w, http.StatusBadRequest, err)
				return
			}
		}
	}
	if f.Service != "" || f.VIP.IsValid() {
		ctx, cancel := context.WithTimeout(r.Context(), engineTimeout)
		defer cancel()
		st, err := s.o.Status(ctx)
		if err != nil {
			writeError(w, http.StatusServiceUnavailable, err)
			return
		}
		var rules []lb.NodeRule
		if s.o.Rules != nil {
			rules = s.o.Rules()
		}
		if err := unknown(f, st.Services, rules); err != nil {
			writeError(w, http.StatusNotFound, err)
			return
		}
	}
	out, began := http.NewResponseController(w), false
	emit := func(batch []lb.TraceEvent) error {
		if !began {
			began = true
			w.Header().Set("Content-Type", "text/event-stream")
			batch = append([]lb.TraceEvent{{}}, batch...) // says that the trace has begun
		}
		var text []byte
		for _, e := range batch {
			line, err := json.Marshal(e)
			if err != nil {
				return err
			}
			text = append(append(append(text, "data: "...), line...), "\n\n"...)
		}
		if text == nil {
			return nil
		}
		err := out.SetWriteDeadline(time.Now().Add(traceTimeout))
		if err == nil {
			_, err = w.Write(text)
		}
		return cmp.Or(err, out.Flush())
	}
	err := s.o.Trace(r.Context(), f, emit)
	switch {
	case err == nil:
	case began:
		emit([]lb.TraceEvent{{Error: err.Error()}}) // in vain if the reader has gone
	case errors.Is(err, lb.ErrTracing):
		writeError(w, http.StatusConflict, err)
	default:
		writeError(w, http.StatusInternalServerError, err)
	}
}

// unknown returns an error if the filter names a service or a VIP that does not exist. The rules of node ports are for
// each address of the node.
func unknown(f lb.TraceFilter, services []lb.ServiceStatus, rules []lb.NodeRule) error {
	vip := f.VIP.Unmap()
	if f.VIP.IsValid() && !slices.ContainsFunc(services, func(s lb.ServiceStatus) bool { return s.Address == vip }) &&
		!slices.ContainsFunc(rules, func(r lb.NodeRule) bool { return r.Addr == vip || r.Addr.IsUnspecified() }) {
		return fmt.Errorf("no service has the address %v; see \"steelyard services\"", f.VIP)
	}
	if f.Service != "" && !slices.ContainsFunc(rules, func(r lb.NodeRule) bool { return r.Service() == f.Service }) {
		return lb.NoService(f.Service, services)
	}
	return nil
}
