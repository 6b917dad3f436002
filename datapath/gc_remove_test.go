package datapath

import (
	"testing"
	"time"

	"github.com/steelyard-lb/steelyard/datapath/dptest"
	"github.com/steelyard-lb/steelyard/datapath/internal/bpf"
	"github.com/steelyard-lb/steelyard/datapath/internal/flow"
)

// A flow goes only if its entry is that of the flow that the agent read: when its port was used again in between, or
// when it had another packet, it stays (D20).
func TestRemovalSparesOtherFlows(t *testing.T) {
	t.Parallel()
	for name, x := range map[string]struct {
		state func(*fixture)
		table bpf.GCTable
	}{
		"established": {established, bpf.GCStream},
		"half-open":   {with(web, tcp(dptest.SYN)), bpf.GCHalfOpen},
		"UDP":         {answered, bpf.GCUDP},
	} {
		t.Run(name, func(t *testing.T) {
			fx := shared(t, hookTC, false, nil)
			x.state(fx)
			table := fx.d.objects.FlowTables()[x.table]
			if table.ID != x.table {
				t.Fatalf("table %d has the id %d", x.table, table.ID)
			}
			flows := entries[bpf.ServerKey, bpf.ServerFlow](t, table.Servers)
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
					stale bpf.ServerFlow
					want  int
				}{
					{false, older, 0}, {false, other, 0}, {false, earlier, 0},
					{true, other, 0}, {true, earlier, 0}, {true, older, 1},
				} {
					r := flow.NewRemover(fx.d.objects.SyGc, y.ended, bpf.Uptime()+time.Second)
					if err := r.Add(table, k, y.stale); err != nil {
						t.Fatal(err)
					}
					if err := r.Flush(); err != nil || r.Removed != y.want {
						t.Errorf("step %d: %d flows removed, %v; want %d", step, r.Removed, err, y.want)
					}
				}
			}
			if n := len(entries[bpf.ServerKey, bpf.ServerFlow](t, table.Servers)); n != 0 {
				t.Errorf("%d entries of servers are left", n)
			}
			if n := len(entries[bpf.ClientKey, bpf.ClientFlow](t, table.Clients)); n != 0 {
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
	table := fx.d.objects.FlowTables()[bpf.GCUDP]
	for k, f := range entries[bpf.ServerKey, bpf.ServerFlow](t, table.Servers) {
		for _, x := range []struct {
			read time.Duration // when the agent began to read
			want int
		}{{bpf.Uptime() - time.Minute, 0}, {bpf.Uptime() + time.Second, 1}} {
			r := flow.NewRemover(fx.d.objects.SyGc, false, x.read)
			if err := r.Add(table, k, f); err != nil {
				t.Fatal(err)
			}
			if err := r.Flush(); err != nil || r.Removed != x.want {
				t.Errorf("read %s ago: %d flows removed, %v; want %d", bpf.Uptime()-x.read, r.Removed, err, x.want)
			}
		}
	}
}
