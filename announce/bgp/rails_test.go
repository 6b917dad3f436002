package bgp

import (
	"errors"
	"log/slog"
	"maps"
	"net/netip"
	"testing"

	"github.com/steelyard-lb/steelyard/lb"
	"github.com/steelyard-lb/steelyard/lb/lbtest/must"
)

// At most MaxRoutes routes are announced. Announced ones stay, and each further VIP has an error.
func TestMaxRoutes(t *testing.T) {
	s := must.Get(New(Options{
		ASN: 64512, RouterID: netip.MustParseAddr("192.0.2.11"), MaxRoutes: 2, Log: slog.New(slog.DiscardHandler),
	}))(t)
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

// FuzzRails: whatever the options that New accepts and the announcements are, each route has an announced VIP, none is
// a default route, and there are no more than MaxRoutes. A VIP without a route has an error, a route that is announced
// and still wanted stays, and a peer with pools gets routes of these only.
func FuzzRails(f *testing.F) {
	// An announced route stays, the aggregate of a pool is larger than the pool, addresses that cannot be routed.
	f.Add([]byte("\x20\x80\x01\x00" + "\xcb\x00\x71\x00\x1f" + "\x01\xcb\x00\x71\x09\x01\x01" +
		"\x02\xcb\x00\x71\x09\x01\x01\xcb\x00\x71\x05\x01\x01"))
	f.Add([]byte("\x18\x40\x00\x18" + "\xcb\x00\x71\x00\x1f" + "\x01\xcb\x00\x71\x03\x01\x01"))
	f.Add([]byte("\x00\x00\x00\x00" + "\xcb\x00\x71\x00\x1f" + "\x02\xe0\x00\x00\x01\x01\x01\x7f\x00\x00\x01\x01\x01"))
	f.Fuzz(func(t *testing.T, b []byte) {
		next := func() (n byte) {
			if len(b) > 0 {
				n, b = b[0], b[1:]
			}
			return n
		}
		four := func() netip.Addr { return netip.AddrFrom4([4]byte{next(), next(), next(), next()}) }
		o := Options{
			ASN: 64512, RouterID: netip.MustParseAddr("192.0.2.11"), AggregateV4: int(next()), AggregateV6: int(next()),
			MaxRoutes: int(next() % 4), Log: slog.New(slog.DiscardHandler),
		}
		o.Peers = []Peer{{Address: netip.MustParseAddr("192.0.2.1"), ASN: 64500, Pools: []string{"own"}}}
		own := Pool{Name: "own", AggregateV4: int(next() % 33)}
		from := four()
		to := from.As4()
		to[3] |= next()
		own.Ranges = []lb.AddrRange{{From: from, To: netip.AddrFrom4(to)}}
		o.Pools = []Pool{own}
		s, err := New(o)
		if err != nil {
			return
		}
		for len(b) > 0 {
			var list []lb.Announcement
			for n := next() % 8; n > 0; n-- {
				vip := four()
				if next()%4 == 0 {
					six := [16]byte{0x20, 1}
					copy(six[2:], vip.AsSlice())
					vip = netip.AddrFrom16(six)
				}
				list = append(list, lb.Announcement{VIP: vip, Weight: int(next())})
			}
			before := maps.Clone(s.wanted)
			checkRails(t, s, list, before, errsOf(t, s.Set(t.Context(), list)))
		}
	})
}

func errsOf(t *testing.T, err error) (errs lb.VIPErrors) {
	t.Helper()
	if err != nil && !errors.As(err, &errs) {
		t.Fatal(err)
	}
	return errs
}

func checkRails(t *testing.T, s *Speaker, list []lb.Announcement, before routes, errs lb.VIPErrors) {
	t.Helper()
	o := s.options()
	if o.MaxRoutes > 0 && len(s.wanted) > o.MaxRoutes {
		t.Fatalf("%d routes; want at most %d", len(s.wanted), o.MaxRoutes)
	}
	only := o.only(&o.Peers[0])
	own := o.Pools[0].Ranges[0]
	wanted := map[netip.Prefix]bool{}
	for _, a := range list {
		p := o.prefixOf(a.VIP)
		_, has := s.wanted[p] // perhaps because of another VIP
		has = has && a.VIP.IsGlobalUnicast()
		if has == (errs[a.VIP] != nil) {
			t.Fatalf("%s: route %t, error %v", a.VIP, has, errs[a.VIP])
		}
		wanted[p] = wanted[p] || a.VIP.IsGlobalUnicast()
	}
	for p := range s.wanted {
		if !wanted[p] || p != p.Masked() || p.Bits() < 1 {
			t.Fatalf("route %s of %v", p, list)
		}
		if only.allows(p) && !(own.Contains(p.Addr()) && own.Contains(lastOf(p))) {
			t.Fatalf("the peer gets %s, which is not in %v", p, own)
		}
	}
	for p := range before {
		if _, stays := s.wanted[p]; wanted[p] && !stays {
			t.Fatalf("route %s is gone", p)
		}
	}
}

// lastOf returns the last address of a prefix.
func lastOf(p netip.Prefix) netip.Addr {
	b := p.Addr().AsSlice()
	for i := p.Bits(); i < 8*len(b); i++ {
		b[i/8] |= 0x80 >> (i % 8)
	}
	a, _ := netip.AddrFromSlice(b)
	return a
}
