package datapath

import (
	"testing"
	"time"

	"github.com/steelyard-lb/steelyard/datapath/dptest"
)

// A flow goes only if its entry is that of the flow that the agent read: when its port was used again in between, or
// when it had another packet, it stays (D20).
func TestRemovalSparesOtherFlows(t *testing.T) {
	t.Parallel()
	for name, x := range map[string]struct {
		state func(*fixture)
		table syGcTable
	}{
		"established": {established, syGcTableGC_STREAM},
		"half-open":   {with(web, tcp(dptest.SYN)), syGcTableGC_HALF_OPEN},
		"UDP":         {answered, syGcTableGC_UDP},
	} {
		t.Run(name, func(t *testing.T) {
			fx := shared(t, hookTC, false, nil)
			x.state(fx)
			table := fx.d.objects.flowTables()[x.table]
			if table.id != x.table {
				t.Fatalf("table %d has the id %d", x.table, table.id)
			}
			flows := entries[syServerKey, syServerFlow](t, table.servers)
			if len(flows) != 1 {
				t.Fatalf("%d flows; want 1", len(flows))
			}
			for k, f := range flows {
				older, other, earlier := f, f, f
				older.F.Seen--
				other.Backend++
				earlier.F.Generation--
				for step, y := range []struct {
					ended bool
					stale syServerFlow
					want  int
				}{
					{false, older, 0}, {false, other, 0}, {false, earlier, 0},
					{true, other, 0}, {true, earlier, 0}, {true, older, 1},
				} {
					r := newFlowRemover(fx.d.objects.SyGc, y.ended, uptime()+time.Second)
					if err := r.add(table, k, y.stale); err != nil {
						t.Fatal(err)
					}
					if err := r.flush(); err != nil || r.removed != y.want {
						t.Errorf("step %d: %d flows removed, %v; want %d", step, r.removed, err, y.want)
					}
				}
			}
			if n := len(entries[syServerKey, syServerFlow](t, table.servers)); n != 0 {
				t.Errorf("%d entries of servers are left", n)
			}
			if n := len(entries[syClientKey, syClientFlow](t, table.clients)); n != 0 {
				t.Errorf("%d entries of clients are left", n)
			}
		})
	}
}

// A flow stays whose client sent a packet after the agent read the server's entry: either side keeps a flow alive.
func TestRemovalSparesAFlowWithPackets(t *testing.T) {
	t.Parallel()
	fx := shared(t, hookTC, false, nil)
	answered(fx)
	table := fx.d.objects.flowTables()[syGcTableGC_UDP]
	for k, f := range entries[syServerKey, syServerFlow](t, table.servers) {
		for _, x := range []struct {
			read time.Duration // when the agent began to read
			want int
		}{{uptime() - time.Minute, 0}, {uptime() + time.Second, 1}} {
			r := newFlowRemover(fx.d.objects.SyGc, false, x.read)
			if err := r.add(table, k, f); err != nil {
				t.Fatal(err)
			}
			if err := r.flush(); err != nil || r.removed != x.want {
				t.Errorf("read %s ago: %d flows removed, %v; want %d", uptime()-x.read, r.removed, err, x.want)
			}
		}
	}
}
