package datapath

import (
	"context"
	"testing"
	"time"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"
)

// With a million flows, a walk removes the expired ones, keeps the others, and uses a part of one CPU.
func TestGarbageCollectionOfAMillionFlows(t *testing.T) {
	const million, idle = 1_000_000, 1000
	fx := newFixture(t, hookTC, false, func(o *Options) { o.MaxFlows = million })
	fillFlows(t, fx.d.objects.SyFlows, million, idle)
	cpu, start := cpuTime(), time.Now()
	fx.d.gc.expire(context.Background())
	cpu, took := cpuTime()-cpu, time.Since(start)
	t.Logf("a walk through %d entries took %s, of which %s on a CPU", 2*million, took, cpu)
	if c := fx.d.gc.counts(); c.Established != million-idle {
		t.Errorf("%d flows were counted; want %d", c.Established, million-idle)
	}
	if cpu > took*3/4 {
		t.Errorf("the walk took %s of %s: that is no pause", cpu, took)
	}
	fx.d.gc.expire(context.Background())
	if c := fx.d.gc.counts(); c.Established != million-idle {
		t.Errorf("%d flows are left; want %d", c.Established, million-idle)
	}
}

// fillFlows puts flows with both directions into a table; the first `idle` of them are expired.
func fillFlows(t *testing.T, m *ebpf.Map, flows, idle int) {
	t.Helper()
	const at = 10_000
	keys, values := make([]syFlowKey, 0, 2*at), make([]syFlow, 0, 2*at)
	for i := range flows {
		f := syFlow{State: uint8(syFlowStateFLOW_ESTABLISHED), Seen: uint64(uptime())}
		if i < idle {
			f.Seen = 0
		}
		k := syFlowKey{Proto: unix.IPPROTO_UDP}
		k.T.Src.W[3], k.T.Dst.W[3] = uint32(i), 1
		f.T.Src.W[3], f.T.Dst.W[3] = uint32(i), 2
		reverse, back := reverseKey(k, f), f
		back.Reply = 1
		back.T.Src, back.T.Dst = k.T.Dst, k.T.Src
		keys, values = append(keys, k, reverse), append(values, f, back)
		if len(keys) == cap(keys) {
			if _, err := m.BatchUpdate(keys, values, nil); err != nil {
				t.Fatal(err)
			}
			keys, values = keys[:0], values[:0]
		}
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
