package agent

import (
	"cmp"
	"context"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"slices"
	"strings"
	"testing"

	"github.com/steelyard-lb/steelyard/config"
	"github.com/steelyard-lb/steelyard/lb"
	"github.com/steelyard-lb/steelyard/lb/file"
	"github.com/steelyard-lb/steelyard/lb/lbtest/must"
)

// collector is a sink that keeps the services.
type collector struct {
	services []*lb.Service
	complete context.CancelFunc
}

func (c *collector) Put(s *lb.Service) { c.services = append(c.services, s) }
func (c *collector) Delete(string)     {}
func (c *collector) Complete(string)   { c.complete() }

// checkRails fails when a valid configuration announces something else than addresses of its pools: by BGP, the whole
// prefix must be in pools.
func checkRails(t *testing.T, text string) (valid bool) {
	t.Helper()
	cfg, err := config.Parse("test.toml", []byte(text))
	if err != nil {
		return false
	}
	source := file.New(nil, nil)
	if source.Use(cfg) != nil {
		return false
	}
	ctx, cancel := context.WithCancel(t.Context())
	got := &collector{complete: cancel}
	must.Do(t, source.Run(ctx, got))
	o := bgpOptions(cfg, facts, nil)
	poolOf := func(a netip.Addr) int {
		return slices.IndexFunc(cfg.Pools, func(p config.Pool) bool { return p.Contains(a) })
	}
	for _, s := range got.services {
		for _, vip := range s.VIPs {
			i := poolOf(vip)
			if i < 0 {
				t.Fatalf("%s of %s is in no pool of\n%s", vip, s.Name, text)
			}
			p := cfg.Pools[i]
			if by := s.Announce; !slices.Equal(by, p.Announce) {
				t.Fatalf("%s of %s is announced by %v of\n%s", vip, s.Name, by, text)
			}
			if len(p.Announce) > 0 && !slices.Contains(p.Announce, lb.AnnounceBGP) {
				continue
			}
			bits := cmp.Or(p.AggregateV6, o.AggregateV6)
			if vip.Is4() {
				bits = cmp.Or(p.AggregateV4, o.AggregateV4)
			}
			prefix := netip.PrefixFrom(vip, bits).Masked()
			if prefix.Bits() < 8 {
				t.Fatalf("%s is announced of\n%s", prefix, text)
			}
			for a := prefix.Addr(); prefix.Contains(a); a = a.Next() {
				if poolOf(a) < 0 {
					t.Fatalf("%s is announced and has %s, which is in no pool of\n%s", prefix, a, text)
				}
			}
		}
	}
	return true
}

// Only addresses of pools are ever announced, whatever valid configuration there is. Most addresses are near the ends
// of pools, and most prefix lengths near the pools' lengths.
func TestRails(t *testing.T) {
	t.Parallel()
	rng := rand.New(rand.NewPCG(12, 12))
	address := func() string {
		if rng.IntN(3) == 0 {
			return fmt.Sprintf("2001:db8::%x", rng.IntN(64))
		}
		return fmt.Sprintf("203.0.113.%d", rng.IntN(64))
	}
	ranged := func() string {
		switch rng.IntN(4) {
		case 0:
			return fmt.Sprintf("203.0.113.%d/%d", rng.IntN(8)*8, 28+rng.IntN(5))
		case 1:
			return fmt.Sprintf("2001:db8::%x/%d", rng.IntN(8)*8, 124+rng.IntN(5))
		case 2:
			return fmt.Sprintf("203.0.113.%d-203.0.113.%d", rng.IntN(64), rng.IntN(64))
		}
		return address()
	}
	lengths := func() (lines string) {
		if rng.IntN(2) == 0 {
			lines += fmt.Sprintf("aggregate_v4 = %d\n", 27+rng.IntN(6))
		}
		if rng.IntN(2) == 0 {
			lines += fmt.Sprintf("aggregate_v6 = %d\n", 123+rng.IntN(6))
		}
		return lines
	}
	valid := 0
	for range 8000 {
		var b strings.Builder
		fmt.Fprintf(&b, "[l2]\n[bgp]\nasn = 64512\n%s", lengths())
		for n := range 1 + rng.IntN(3) {
			fmt.Fprintf(&b, "[[pool]]\nname = \"p%d\"\naddresses = [%q, %q]\n", n, ranged(), ranged())
			if rng.IntN(3) == 0 {
				b.WriteString(lengths())
			}
			if rng.IntN(3) == 0 {
				fmt.Fprintf(&b, "announce = [%q]\n", lb.AnnouncerKinds[rng.IntN(len(lb.AnnouncerKinds))])
			}
		}
		for n := range 1 + rng.IntN(3) {
			fmt.Fprintf(&b, "[[service]]\nname = \"s%d\"\nports = [\"%d\"]\nforward = \"tunnel\"\n", n, 80+n)
			b.WriteString("backends = [\"10.0.0.1\", \"fd00::1\"]\n")
			if rng.IntN(2) == 0 {
				fmt.Fprintf(&b, "address = [%q, %q]\n", address(), address())
			} else {
				fmt.Fprintf(&b, "pool = \"p%d\"\naddress_per_node = %t\n", rng.IntN(3), rng.IntN(2) == 0)
			}
		}
		if checkRails(t, b.String()) {
			valid++
		}
	}
	must.True(t, valid >= 50, "only %d configurations were valid", valid)
	t.Logf("%d configurations were valid", valid)
}
