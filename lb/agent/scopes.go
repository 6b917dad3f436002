package agent

import (
	"context"
	"slices"

	"github.com/steelyard-lb/steelyard/datapath"
	"github.com/steelyard-lb/steelyard/lb"
)

// scopes answers the API about connections of every scope.
type scopes struct {
	vips  forwarder
	proxy insider // nil if the agent is not the service proxy
}

// flows lists flows, those to VIPs first, as admin.Options.Flows.
func (s scopes) flows(ctx context.Context, want lb.FlowFilter) (all []lb.FlowStatus, more bool, err error) {
	all, more, err = s.vips.Flows(ctx, want)
	if s.proxy == nil || more || err != nil {
		return all, more, err
	}
	rest := want
	if want.Limit > 0 {
		rest.Limit = max(1, want.Limit-len(all)) // 0 would mean no limit
	}
	inside, more, err := s.proxy.Flows(ctx, rest)
	if all = append(all, inside...); want.Limit > 0 && len(all) > want.Limit {
		all, more = all[:want.Limit], true
	}
	return all, more, err
}

// explain says what happens to a packet, as admin.Options.Explain.
func (s scopes) explain(q lb.Question) (lb.Explanation, error) {
	if s.proxy == nil {
		return s.vips.Explain(q)
	}
	e, ok, err := s.proxy.Explain(q)
	if !ok && err == nil {
		return s.vips.Explain(q)
	}
	named := func(r datapath.Reason) bool { return r.Name == e.Reason }
	if all := datapath.Reasons(); slices.ContainsFunc(all, named) {
		e.Meaning = all[slices.IndexFunc(all, named)].Text
	}
	return e, err
}

// trace passes on packets of every scope, as admin.Options.Trace.
func (s scopes) trace(ctx context.Context, f lb.TraceFilter, emit func([]lb.TraceEvent) error) error {
	return s.vips.Trace(ctx, f, s.proxy, emit)
}
