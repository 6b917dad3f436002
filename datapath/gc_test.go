package datapath

import (
	"context"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/steelyard-lb/steelyard/datapath/internal/bpf"
)

// With a million flows, a walk removes the expired ones, keeps the others, and uses a part of one CPU.
func TestGarbageCollectionOfAMillionFlows(t *testing.T) {
	const million, idle = 1_000_000, 1000
	fx := newFixture(t, hookTC, false, func(o *Options) { o.MaxFlows = million })
	fillFlows(t, fx.d.objects.FlowTables()[2], million, idle)
	cpu, start := cpuTime(), time.Now()
	fx.d.flows.Collect(context.Background(), nil)
	cpu, took := cpuTime()-cpu, time.Since(start)
	t.Logf("a walk through %d entries took %s, of which %s on a CPU", 2*million, took, cpu)
	if c := fx.d.flows.Counts(); c.Established != million-idle {
		t.Errorf("%d flows were counted; want %d", c.Established, million-idle)
	}
	if cpu > took*3/4 {
		t.Errorf("the walk took %s of %s: that is no pause", cpu, took)
	}
	fx.d.flows.Collect(context.Background(), nil)
	if c := fx.d.flows.Counts(); c.Established != million-idle {
		t.Errorf("%d flows are left; want %d", c.Established, million-idle)
	}
}

// fillFlows puts established flows into a table; the first `idle` of them are expired.
func fillFlows(t *testing.T, table bpf.FlowTable, flows, idle int) {
	t.Helper()
	fillFlowsOf(t, table, flows, idle, 0, 0)
}

// fillFlowsOf is fillFlows for flows of a frontend to a backend.
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
		if _, err := table.Clients.BatchUpdate(ck, cv, nil); err != nil {
			t.Fatal(err)
		}
		if _, err := table.Servers.BatchUpdate(sk, sv, nil); err != nil {
			t.Fatal(err)
		}
		ck, cv, sk, sv = ck[:0], cv[:0], sk[:0], sv[:0]
	}
}

// cpuTime is the CPU time of the process.
func cpuTime() time.Duration {
	var u unix.Rusage
	if err := unix.Getrusage(unix.RUSAGE_SELF, &u); err != nil {
		panic(err)
	}
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}
