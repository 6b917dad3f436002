package datapath

import (
	"context"
	"testing"
	"time"

	"github.com/steelyard-lb/steelyard/datapath/dptest"
	"github.com/steelyard-lb/steelyard/datapath/internal/bpf"
	"github.com/steelyard-lb/steelyard/datapath/internal/flow"
	"github.com/steelyard-lb/steelyard/lb/lbtest/must"
	"golang.org/x/sys/unix"
)

// A flow is removed only if its entry still belongs to the flow that the agent read. It stays if its port was reused in
// between, or if it has had another packet (D20).
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
			must.Need(t, table.ID == x.table, "table %d has the id %d", x.table, table.ID)
			flows := entries[bpf.ServerKey, bpf.ServerFlow](t, table.Servers)
			must.Need(t, len(flows) == 1, "%d flows; want 1", len(flows))
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
					must.Do(t, r.Add(table, k, y.stale))
					must.Do(t, r.Flush())
					must.Row(t, step, y.want, r.Removed)
				}
			}
			must.Do(t, fx.flowsIn(table).want(0, 0))
		})
	}
}

// A flow stays if its client sent a packet after the agent read the server's entry, because either side keeps a flow
// alive.
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
			must.Do(t, r.Add(table, k, f))
			if err := r.Flush(); err != nil || r.Removed != x.want {
				t.Errorf("read %s ago: %d flows removed, %v; want %d", bpf.Uptime()-x.read, r.Removed, err, x.want)
			}
		}
	}
}

// With a million flows, a walk removes the expired ones, keeps the others, and uses only part of one CPU.
func TestGarbageCollectionOfAMillionFlows(t *testing.T) {
	const million, idle = 1_000_000, 1000
	fx := newFixture(t, hookTC, false, func(o *Options) { o.MaxFlows = million })
	fillFlows(t, fx.d.objects.FlowTables()[2], million, idle)
	cpu, start := cpuTime(), time.Now()
	fx.d.flows.Collect(context.Background(), nil)
	cpu, took := cpuTime()-cpu, time.Since(start)
	t.Logf("a walk through %d entries took %s, of which %s on a CPU", 2*million, took, cpu)
	c := fx.d.flows.Counts()
	must.True(t, c.Established == million-idle, "%d flows were counted; want %d", c.Established, million-idle)
	must.True(t, cpu <= took*3/4, "the walk took %s of %s: that is no pause", cpu, took)
	fx.d.flows.Collect(context.Background(), nil)
	c = fx.d.flows.Counts()
	must.True(t, c.Established == million-idle, "%d flows are left; want %d", c.Established, million-idle)
}

// fillFlows puts established flows into a table, the first `idle` of which have expired.
func fillFlows(t *testing.T, table bpf.FlowTable, flows, idle int) {
	t.Helper()
	fillFlowsOf(t, table, flows, idle, 0, 0)
}

// fillFlowsOf is fillFlows for a frontend's flows to a backend.
func fillFlowsOf(t *testing.T, table bpf.FlowTable, flows, idle int, frontend, backend uint32) {
	t.Helper()
	const at = 10_000
	ck, cv := make([]bpf.ClientKey, 0, at), make([]bpf.ClientFlow, 0, at)
	sk, sv := make([]bpf.ServerKey, 0, at), make([]bpf.ServerFlow, 0, at)
	for i := range flows {
		f := bpf.Flow{State: uint8(bpf.FlowEstablished), Seen: bpf.FlowClock(bpf.Uptime())}
		if i < idle {
			f.Seen -= bpf.FlowClock(24 * time.Hour)
		}
		c := bpf.ClientKey{Sport: uint16(i), Frontend: frontend}
		c.Client.W[3] = uint32(i)
		s := bpf.ServerKey{Server: unix.IPPROTO_TCP, Dport: uint16(i)}
		s.To.W[3] = uint32(i)
		ck, cv = append(ck, c), append(cv, bpf.ClientFlow{F: f, Source: s.To, Sport: s.Dport, Backend: backend})
		sk, sv = append(sk, s), append(sv, bpf.ServerFlow{F: f, Client: c, Backend: backend})
		if len(ck) < cap(ck) {
			continue
		}
		must.Get(table.Clients.BatchUpdate(ck, cv, nil))(t)
		must.Get(table.Servers.BatchUpdate(sk, sv, nil))(t)
		ck, cv, sk, sv = ck[:0], cv[:0], sk[:0], sv[:0]
	}
}

// cpuTime returns the process's CPU time.
func cpuTime() time.Duration {
	var u unix.Rusage
	if err := unix.Getrusage(unix.RUSAGE_SELF, &u); err != nil {
		panic(err)
	}
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}
