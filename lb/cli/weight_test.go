package cli

import (
	"context"
	"strings"
	"testing"

	"github.com/steelyard-lb/steelyard/lb"
	"github.com/steelyard-lb/steelyard/lb/admin"
	"github.com/steelyard-lb/steelyard/lb/lbtest/must"
)

// A drain's weight and the end of flows, as typed and answered.
func TestWeightAndFlowsEnd(t *testing.T) {
	socket := serve(t, lb.Status{}, func(o *admin.Options) {
		o.SetWeight = func(_ context.Context, target lb.DrainTarget, weight int) (lb.Drains, error) {
			return lb.Drains{}.WithWeight(target, weight), nil
		}
		o.EndFlows = func(_ context.Context, want lb.FlowFilter) (ended, kept int, err error) {
			return 1, len(want.Service), nil
		}
	})
	for _, tt := range []struct {
		args string
		code int
		want string
	}{
		{"weight web 10.0.0.1 3", 0, "weights: 3 for 10.0.0.1 of web\n"},
		{"weight web 10.0.0.1 default", 0, "weights: as configured\n"},
		{"weight web 10.0.0.1 x", 1, "want a number from 0 to 1000, or default"},
		{"weight web 10.0.0.1", 2, "takes 3 arguments, got 2"},
		{"flows end --client 192.0.2.0/24 --backend 10.0.0.1", 0, "ended: 1 connection\n"},
		{"flows end --service w", 0, "kept: 1 connection by dsr or tunnel"},
		{"flows end", 2, "want --client, --service or --backend"},
		{"flows end --client x", 2, "neither an IP address nor a prefix"},
	} {
		code, out, errOut := steelyard(t, append(strings.Fields(tt.args), "--socket", socket)...)
		must.True(t, code == tt.code && strings.Contains(out+errOut, tt.want),
			"%s: %d %s%s", tt.args, code, out, errOut)
	}
}
