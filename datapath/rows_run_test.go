package datapath

import (
	"bytes"
	"slices"
	"testing"

	"github.com/steelyard-lb/steelyard/datapath/dptest"
	"github.com/steelyard-lb/steelyard/datapath/internal/bpf"
	"github.com/steelyard-lb/steelyard/lb/lbtest/must"
)

// Rows that need other options have their own host. Rows that change the host have one for every hook and family.
func TestRows(t *testing.T) {
	t.Parallel()
	t.Run("together", func(t *testing.T) {
		each(t, func(t *testing.T, h hookName, v6 bool) {
			t.Parallel()
			fx := shared(t, h, v6, nil)
			for _, r := range rows {
				if !r.alone && r.option == nil && (fx.v6 || r.reason != "neighbour_discovery") { // IPv4 has none
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
				each(t, func(t *testing.T, h hookName, v6 bool) { r.run(t, newFixture(t, h, v6, r.option)) })
			})
		}
	})
}

func (r row) run(t *testing.T, fx *fixture) {
	fx.reset()
	r.state(fx)
	in := r.in(fx)
	got := fx.run(in.Frame())
	must.Need(t, got.did == r.did && got.reason == r.reason,
		"%s: %s; want %s: %s", got.did, got.reason, r.did, r.reason)
	if r.did == "sent" && r.reason == "forwarded" {
		want := wholeFrame(in, got.out)
		must.True(t, bytes.Equal(got.frame, want), "sent\n%x; want\n%x", got.frame, want)
	}
	if r.check != nil {
		must.Do(t, r.check(fx, in, got.out))
	}
}

// wholeFrame returns the frame that a packet should become. It takes some fields from the packet that was sent, because
// the datapath may choose them and the checks of rows cover them: addresses and ports, the method, the packet that an
// ICMP error quotes, and a tunnel's flow label.
func wholeFrame(in, out dptest.Packet) []byte {
	want := in
	want.TTL = 63
	if out.Inner == nil {
		want.Src, want.Dst = out.Src, out.Dst
		if want.Proto == dptest.ICMP || want.Proto == dptest.ICMPv6 {
			want.Payload = out.Payload
		}
	} else {
		inner := want
		want = dptest.Packet{Src: out.Src, Dst: out.Dst, Proto: out.Proto, Label: out.Label, TOS: in.TOS, DF: true,
			NoSum: true, Inner: &inner, Payload: dptest.GUE(inner)}
	}
	frame := want.Frame()
	copy(frame, []byte{2, 0, 0, 0, 0, 9}) // the MAC address of all neighbours in the fixture
	copy(frame[6:], dptest.MAC)
	return frame
}

// Every reason has a row.
func TestEveryReasonHasARow(t *testing.T) {
	names := must.Get(bpf.ReadNames(must.Get(bpf.LoadSy())(t)))(t)
	// icmp_ratelimited and the tunnel keys have their own tests. No packet causes internal_error.
	have := []string{"none", "max", "internal_error", "icmp_ratelimited", "tunnel_key_mismatch", "tunnel_spoofed"}
	for _, r := range rows {
		have = append(have, r.reason)
	}
	for _, reason := range names.Reasons {
		must.True(t, slices.Contains(have, reason), "no row gives the reason %q", reason)
	}
}
