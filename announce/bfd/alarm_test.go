package bfd_test

import (
	"os"
	"runtime"
	"strings"
	"testing"
	"time"

	"github.com/steelyard-lb/steelyard/e2e/lab"
	"github.com/steelyard-lb/steelyard/e2e/lab/peers"
	"github.com/steelyard-lb/steelyard/lb/lbtest/must"
)

// TestNoFalseAlarm has a session without a failure for some time, which must not end. BFD_TIME=10m has 3 packets of 100
// ms, as long as that says, with all processors busy; alone on the machine. Without BFD_TIME the machine runs other
// tests, and so there are 10 packets and no load.
func TestNoFalseAlarm(t *testing.T) {
	long := os.Getenv("BFD_TIME")
	eachRouter(t, func(t *testing.T, kind peers.RouterKind) {
		duration, multiplier := 10*time.Second, 10
		if long != "" {
			var err error
			if duration, err = time.ParseDuration(long); err != nil {
				t.Fatalf("BFD_TIME: %v", err)
			}
			multiplier = 3
		}
		p := newPairOf(t, kind, multiplier)
		child := p.start(t, "192.0.2.1", multiplier)
		p.sees(t, "192.0.2.2", "up")
		if long != "" {
			for range (runtime.NumCPU() + 1) / 2 { // as many for the other router
				busy := lab.Command{Path: "/bin/sh", Args: []string{"-c", "while :; do :; done"}, Abrupt: true}
				must.Get(p.host.Start(busy))(t)
			}
		}
		time.Sleep(duration)
		var alarms []string
		for _, line := range child.Log.Lines() {
			if strings.Contains(line, "bfd session down") {
				alarms = append(alarms, line)
			}
		}
		t.Logf("%s: %d false alarms in %v, %d × 100 ms", kind, len(alarms), duration, multiplier)
		if len(alarms) > 0 {
			t.Errorf("false alarms:\n%s", strings.Join(alarms, "\n"))
		}
		if state, err := p.state(t.Context(), "192.0.2.2"); err != nil || state != "up" {
			t.Errorf("the session is %s at the router in the end, %v", state, err)
		}
	})
}
