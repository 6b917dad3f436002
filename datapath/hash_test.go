package datapath

import (
	"net/netip"
	"testing"

	"github.com/steelyard-lb/steelyard/datapath/dptest"
	"github.com/steelyard-lb/steelyard/lb"
)

// The servers of flows follow from the seed: who does not know it cannot compute which flows go to one server (D23).
// Balancers with the same seed choose the same server.
func TestServersFollowFromTheSeed(t *testing.T) {
	t.Parallel()
	eachOnce(t, func(t *testing.T, h hookName, v6 bool) {
		const flows = 100
		servers := func(seed byte) (to [flows]netip.Addr) {
			fx := shared(t, h, v6, func(o *Options) { o.HashSeed = [32]byte{seed} })
			fx.tunnelTo(lb.TCP, nil, 21, 22)
			for i := range to {
				to[i] = fx.went(fx.on(i, dptest.TCP, dptest.SYN))
			}
			return to
		}
		first, other := servers(1), servers(2)
		if again := servers(1); again != first {
			t.Error("two balancers with one seed choose different servers")
		}
		same := 0
		for i := range first {
			if first[i] == other[i] {
				same++
			}
		}
		if same > flows*3/4 {
			t.Errorf("with another seed %d of %d flows have the same server; want about half", same, flows)
		}
	})
}
