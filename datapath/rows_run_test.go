package datapath

import (
	"slices"
	"testing"
)

// Rows that need other options have a host of their own; those that change the host, one for every hook and family.
func TestRows(t *testing.T) {
	t.Run("together", func(t *testing.T) {
		eachOf(t, nil, func(t *testing.T, fx *fixture) {
			for _, r := range rows {
				if !r.alone && r.option == nil {
					t.Run(r.name, func(t *testing.T) {
						fx.t = t
						r.run(t, fx)
					})
				}
			}
		})
	})
	t.Run("alone", func(t *testing.T) {
		for _, r := range rows {
			if !r.alone && r.option == nil {
				continue
			}
			t.Run(r.name, func(t *testing.T) {
				if !r.alone {
					eachOf(t, r.option, func(t *testing.T, fx *fixture) { r.run(t, fx) })
					return
				}
				each(t, func(t *testing.T, h hook, v6 bool) { r.run(t, newFixture(t, h, v6, r.option)) })
			})
		}
	})
}

func (r row) run(t *testing.T, fx *fixture) {
	if !fx.v6 && r.reason == "neighbour_discovery" {
		return // there is no NDP for IPv4
	}
	fx.reset()
	r.state(fx)
	in := r.in(fx)
	got := fx.run(in.Frame())
	if got.did != r.did || got.reason != r.reason {
		t.Fatalf("%s: %s; want %s: %s", got.did, got.reason, r.did, r.reason)
	}
	if r.check != nil {
		if err := r.check(fx, in, got.out); err != nil {
			t.Error(err)
		}
	}
}

// Every reason has a row.
func TestEveryReasonHasARow(t *testing.T) {
	reasons, err := reasonNames()
	if err != nil {
		t.Fatal(err)
	}
	// icmp_ratelimited and the keys of tunnels have tests of their own, vlan_stacked is in the model's, and no packet
	// causes internal_error.
	have := []string{"none", "max", "internal_error", "icmp_ratelimited", "vlan_stacked", "tunnel_key_mismatch",
		"tunnel_spoofed"}
	for _, r := range rows {
		have = append(have, r.reason)
	}
	for _, reason := range reasons {
		if !slices.Contains(have, reason) {
			t.Errorf("no row gives the reason %q", reason)
		}
	}
}
