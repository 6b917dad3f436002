package bgp

import (
	"errors"
	"log/slog"
	"net/netip"
	"testing"

	"github.com/steelyard-lb/steelyard/lb"
)

// No more than MaxRoutes are announced. What is announced stays, and each VIP beyond has an error.
func TestMaxRoutes(t *testing.T) {
	s, err := New(Options{
		ASN: 64512, RouterID: netip.MustParseAddr("192.0.2.11"), MaxRoutes: 2, Log: slog.New(slog.DiscardHandler),
	})
	if err != nil {
		t.Fatal(err)
	}
	vip := func(n byte) netip.Addr { return netip.AddrFrom4([4]byte{203, 0, 113, n}) }
	for i, step := range []struct {
		vips    []byte
		refused []byte
	}{
		{[]byte{5, 6}, nil}, {[]byte{4, 5, 6, 7}, []byte{4, 7}}, {[]byte{4, 6, 7}, []byte{7}}, {[]byte{7}, nil},
	} {
		var list []lb.Announcement
		for _, n := range step.vips {
			list = append(list, lb.Announcement{VIP: vip(n), Weight: 1})
		}
		var errs lb.VIPErrors
		if err := s.Set(t.Context(), list); err != nil && !errors.As(err, &errs) {
			t.Fatal(err)
		}
		for _, n := range step.refused {
			if errs[vip(n)] == nil {
				t.Errorf("step %d: no error for %s: %v", i, vip(n), errs)
			}
		}
		if len(errs) != len(step.refused) || len(s.wanted) != len(step.vips)-len(step.refused) {
			t.Errorf("step %d: errors %v, routes %v", i, errs, s.wanted)
		}
	}
}
