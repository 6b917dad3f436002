package route

import (
	"net/netip"
	"slices"
	"testing"
	"time"
)

// If there are more routers than are asked per round, those that have not answered are asked each time, and the others
// take turns.
func TestManyRouters(t *testing.T) {
	var all []Router
	r := Routers{Known: map[Router]Asked{}}
	start := time.Now()
	for i := range 2 * maxAsked {
		x := Router{NIC: 1, Addr: netip.AddrFrom4([4]byte{192, 0, 2, byte(i)})}
		all = append(all, x)
		r.Known[x] = Asked{at: start.Add(-time.Duration(i) * time.Second)}
	}
	silent, dead := all[0], all[1]
	r.Known[silent] = Asked{at: start, requests: 2}
	r.Known[dead] = Asked{at: start, requests: maxRequests, Failed: true}
	first := r.first(slices.Clone(all))
	if len(first) != maxAsked || first[0] != silent || first[1] != all[len(all)-1] || slices.Contains(first, dead) {
		t.Errorf("%d routers: %v", len(first), first)
	}
}
