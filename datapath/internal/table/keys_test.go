package table

import (
	"net/netip"
	"testing"

	"github.com/steelyard-lb/steelyard/lb"
	"github.com/steelyard-lb/steelyard/lb/lbtest/must"
)

// The prefixes of a range cover exactly its ports, and name its frontend.
func TestRangeKeys(t *testing.T) {
	for _, f := range []lb.Frontend{
		{Port: 10000, Last: 10999, Protocol: lb.UDP}, {Port: 1, Last: 65535, Protocol: lb.TCP, Decap: true},
		{Port: 7, Last: 8, Protocol: lb.SCTP, Decap: true},
	} {
		f.VIP = netip.MustParseAddr("203.0.113.10")
		next := int(f.Port)
		for _, k := range toRangeKeys(f) {
			part := fromRangeKey(k)
			must.Row(t, f.String(), next, int(part.Port))
			next = int(part.Last) + 1
			part.Port, part.Last = f.Port, f.Last
			must.Row(t, "the frontend", f, part)
		}
		must.Row(t, f.String(), int(f.Last)+1, next)
	}
}
