package admin

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"net/netip"
	"strconv"

	"github.com/steelyard-lb/steelyard/lb"
)

// Weights is the response of /v1/weight.
type Weights struct {
	Weights []lb.SetWeight `json:"weights"` // that operators have set
}

// setWeight sets the weight of a server.
func (s *Server) setWeight(w http.ResponseWriter, r *http.Request) {
	ctx, cancel := context.WithTimeout(r.Context(), engineTimeout)
	defer cancel()
	q := r.URL.Query()
	t := lb.DrainTarget{Service: q.Get("service")}
	weight, err := parseWeight(q.Get("weight"))
	if err == nil {
		t.Address, err = serverAddress(q.Get("backend"))
	}
	if err == nil && t.Service == "" {
		err = errors.New("want service=NAME")
	}
	var now lb.Drains
	if err == nil {
		now, err = s.o.SetWeight(ctx, t, weight)
	}
	if err != nil {
		writeError(w, http.StatusBadRequest, err)
		return
	}
	write(w, http.StatusOK, Weights{listOf(now.Weights)})
}

// parseWeight returns the weight, or -1 for "default".
func parseWeight(text string) (int, error) {
	if text == "default" {
		return -1, nil
	}
	n, err := strconv.ParseUint(text, 10, 16)
	if err != nil || n > lb.MaxWeight {
		return 0, fmt.Errorf("weight %q: want a number from 0 to %d, or default", text, lb.MaxWeight)
	}
	return int(n), nil
}

// serverAddress parses the address of a server, which has no port.
func serverAddress(text string) (netip.Addr, error) {
	a, err := netip.ParseAddr(text)
	if err != nil {
		err = fmt.Errorf("%.50q is not an address; write the server's address without a port", text)
	}
	return a.Unmap(), err
}
