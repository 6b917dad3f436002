package lb

import (
	"net/netip"
	"testing"

	"github.com/steelyard-lb/steelyard/lb/lbtest/must"
)

func TestAddrRangeSize(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct {
		from, to string
		want     float64
	}{
		{"192.0.2.1", "192.0.2.1", 1}, {"192.0.2.255", "192.0.3.1", 3}, {"0.0.0.0", "255.255.255.255", 1 << 32},
		{"2001:db8::ff", "2001:db8::1:0", 0xff02}, {"2001:db8::", "2001:db8::ffff:ffff:ffff:ffff", 1 << 64},
	} {
		r := AddrRange{netip.MustParseAddr(tt.from), netip.MustParseAddr(tt.to)}
		must.Row(t, tt.from+"-"+tt.to, tt.want, r.Size())
	}
}
