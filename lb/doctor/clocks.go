package doctor

import (
	"context"
	"fmt"
	"math"

	"github.com/steelyard-lb/steelyard/lb"
)

// clockDiffers is how many seconds clocks may differ. NTP keeps them within one.
const clockDiffers = 5

// clocks compares the members' clocks, which are in their responses, with this node's. A member may respond any time
// during the round trip.
func clocks(_ context.Context, n *Node) ([]lb.Finding, string) {
	var faults []fault
	known := false
	for _, m := range n.Members {
		if m.State != lb.MemberUp || m.Within == 0 {
			continue
		}
		known = true
		if math.Abs(m.Ahead) <= clockDiffers+m.Within {
			continue
		}
		than := "ahead of"
		if m.Ahead < 0 {
			than = "behind"
		}
		faults = append(faults, fault{m.Name, fmt.Sprintf("the clock of member %s is %.1f s %s this node's", m.Name,
			math.Abs(m.Ahead), than)})
	}
	if !known {
		return nil, "no member of [l2] has reported its clock"
	}
	return merged(lb.FoundClock, faults), ""
}
