package datapath

import (
	"context"
	"errors"
	"net/netip"
	"os"
	"reflect"
	"slices"
	"testing"

	"github.com/cilium/ebpf"
	"github.com/steelyard-lb/steelyard/datapath/dptest"
	"github.com/steelyard-lb/steelyard/datapath/internal/bpf"
	"github.com/steelyard-lb/steelyard/datapath/internal/table"
	"github.com/steelyard-lb/steelyard/e2e/lab/labtest"
	"github.com/steelyard-lb/steelyard/lb"
	"github.com/steelyard-lb/steelyard/lb/lbtest/must"
)

// A table is read as it was written, even across chunks. Its words are reused after collect, not before.
func TestTablesAreStored(t *testing.T) {
	t.Parallel()
	fx := newFixture(t, hookTC, false, nil)
	s := fx.d.services.Slots
	var f, g bpf.Frontend
	none := [3]uint32{table.NoBackend, table.NoBackend, table.NoBackend}
	want := table.Table{Slots: make([]table.Slot, 3*slotsPerChunk/2), Older: []table.Slot{{Backend: 5, Previous: none}}}
	for i := range want.Slots {
		want.Slots[i] = table.Slot{Backend: uint32(i), Previous: none}
		if i%3 == 0 {
			want.Slots[i].Previous = [3]uint32{uint32(i + 1), table.AnyBackend, table.NoBackend}
		}
	}
	fx.do(func() error { return s.Write(want, &f) })
	got, err := s.Read(f)
	must.True(t, err == nil && reflect.DeepEqual(got, want), "the table is not what was written; %v", err)
	top := s.Space.Top
	s.Retire(f)
	must.Do(t, s.Write(table.Table{Slots: want.Slots[:100]}, &g))
	must.True(t, g.Table.First >= top, "assigned before a grace period: %d", g.Table.First)
	must.Do(t, errors.Join(s.Collect(), s.Write(table.Table{Slots: want.Slots[:100]}, &g)))
	must.True(t, g.Table.First < top, "words of a retired table were not assigned again: %d", g.Table.First)
}

// The arrays grow once for all plans of a delta, because each time takes a grace period. Words for the next tables are
// added outside Apply.
func TestArraysGrowOnce(t *testing.T) {
	t.Parallel()
	fx := newFixture(t, hookTC, false, nil)
	slots := fx.d.chunks.Slots
	var delta lb.Delta
	for i := range 300 {
		delta.Put = append(delta.Put, lb.Build(sizedService(i, 10, false), nil, lb.Drains{}).Frontends...)
	}
	fx.apply(delta)
	must.Need(t, slots.Len() >= 2*slotsPerChunk/table.LineWords, "%d lines; want several chunks of them", slots.Len())
	all := fx.d.chunks
	for _, c := range []*table.Chunked{all.Slots, all.Backends, all.FrontendCounters, all.BackendCounters} {
		must.True(t, c.Grown == 1, "%s grew %d times for one delta; want once", c.Name(), c.Grown)
	}
	s := fx.d.services.Slots
	s.Space.Top = s.Words.Len() * table.LineWords // all chunks are full
	fx.do(func() error { return s.Reserve(table.SpareWords) })
	grown := slots.Grown
	fx.apply(lb.Delta{Put: delta.Put[:1]})
	must.True(t, slots.Grown == grown, "a change after room was made took a grace period")
}

const slotsPerChunk = 65536 // SLOT_CHUNK of bpf/maps.h

// Chunks have their template's BTF. Linux before 6.2 compares it when a chunk is added, and returns EINVAL for a map
// without BTF (D1). An array has a fixed size, so that the verifier inlines its lookups.
func TestChunksHaveTheTypesOfTheirTemplate(t *testing.T) {
	t.Parallel()
	fx := newFixture(t, hookTC, false, nil)
	fx.service(lb.TCP, "b1")
	for _, c := range []*table.Chunked{fx.d.chunks.Slots, fx.d.chunks.Backends, fx.d.chunks.FrontendCounters,
		fx.d.chunks.Handshakes} {
		must.Need(t, len(c.Chunks) == 1, "%s has %d chunks; want 1", c.Name(), len(c.Chunks))
		info := must.Get(c.Chunks[0].Info())(t)
		id, ok := info.BTFID()
		must.True(t, c.Spec.Value == nil || ok && id > 0, "a chunk of %s has no BTF", c.Name())
	}
}

// An agent that takes over finds the tables and does not reuse their words.
func TestTablesSurviveARestart(t *testing.T) {
	t.Parallel()
	fx := newFixture(t, hookXDP, false, nil)
	fx.tunnelTo(lb.TCP, nil, 21, 22, 23)
	fx.tunnelTo(lb.TCP, nil, 21, 22)
	at := lb.Frontend{VIP: fx.addr("vip"), Port: 80, Protocol: lb.TCP}
	value := fx.d.services.Frontends[at].Value
	before := must.Get(fx.d.services.Slots.Read(value))(t)
	must.Need(t, slices.ContainsFunc(before.Slots, table.Slot.Changed), "no slot has an earlier backend")
	to := fx.went(fx.on(1, dptest.TCP, dptest.SYN))
	fx.close()
	fx.open()
	must.Row(t, "the frontend", value, fx.d.services.Frontends[at].Value)
	after, err := fx.d.services.Slots.Read(value)
	must.True(t, err == nil && reflect.DeepEqual(before, after), "the table changed; %v", err)
	var f bpf.Frontend
	must.Do(t, fx.d.services.Slots.Write(table.Table{Slots: make([]table.Slot, 50)}, &f))
	for _, x := range table.SpansOf(value) {
		x = table.WholeLines(x)
		must.True(t, f.Table.First < x.First || f.Table.First >= x.End(), "words of %v were assigned again", x)
	}
	must.Row(t, "the server of a flow", to, fx.went(fx.on(1, dptest.TCP, dptest.SYN)))
}

// Memory follows the configuration: without services there is no chunk, and with one service there is one chunk of each
// kind.
func TestMemoryFollowsTheConfiguration(t *testing.T) {
	t.Parallel()
	fx := newFixture(t, hookTC, false, nil)
	size := func() (n uint64) {
		for _, c := range []*table.Chunked{fx.d.chunks.Slots, fx.d.chunks.Backends, fx.d.chunks.FrontendCounters,
			fx.d.chunks.BackendCounters, fx.d.chunks.Handshakes} {
			for _, m := range c.Chunks {
				info := must.Get(m.Info())(t)
				bytes, _ := info.Memlock()
				n += bytes
			}
		}
		return n
	}
	must.Row(t, "bytes without a service", 0, size())
	fx.service(lb.TCP, "b1", "b2")
	perCPU := uint64(2 * 1024 * 24 * ebpf.MustPossibleCPU())
	if n, limit := size(), 2*(256<<10+1024*(96+136))+perCPU; n == 0 || n > limit+perCPU {
		t.Errorf("%d bytes with one service; want at most %d", n, limit+perCPU)
	}
}

// With the default of max_flows (config.Default) and one service, all maps take at most 84 MiB.
func TestMemoryOfOneService(t *testing.T) {
	t.Parallel()
	fx := newFixture(t, hookTC, false, func(o *Options) { o.MaxFlows = 1 << 18 })
	fx.service(lb.TCP, "b1", "b2")
	fx.do(func() error {
		n, err := mapsMemory(fx.o.PinPath)
		limit := uint64(84<<20 + (ebpf.MustPossibleCPU()-2)*(512<<10))
		must.True(t, n <= limit, "the maps take %d bytes; want at most %d", n, limit)
		return err
	})
}

// The number of active plans does not change the datapath's number of open files (D26).
func TestPlansOpenNoFiles(t *testing.T) {
	fx := newFixture(t, hookTC, false, nil)
	open := func() int {
		files := must.Get(os.ReadDir("/proc/self/fd"))(t)
		return len(files)
	}
	fx.service(lb.TCP, "b1", "b2")
	before := open()
	var delta lb.Delta
	const plans = 900 // out of 1,024 in a chunk
	for i := range plans {
		delta.Put = append(delta.Put, lb.Build(sizedService(i, 2, true), nil, lb.Drains{}).Frontends...)
	}
	fx.apply(delta)
	const some = plans / 10 // a chunk of slots, and files that the runtime opens
	after := open()
	must.True(t, after <= before+some, "%d files with one plan, %d with %d more", before, after, plans)
}

// Words are added before the first change, and again after frontends were applied, so no change waits for a grace
// period.
func TestRoomIsMadeAheadOfChanges(t *testing.T) {
	t.Parallel()
	fx := newFixture(t, hookTC, false, nil)
	s := fx.d.services.Slots
	must.Run(t, func(ctx context.Context) error { return fx.host.Do(func() error { return s.Run(ctx) }) })
	room := func() error {
		s.Mu.Lock()
		defer s.Mu.Unlock()
		free := s.Words.Len()*table.LineWords - s.Space.Top
		return wrong(free < table.SpareWords, "for %d words", free)
	}
	labtest.Until(t, "there is room at the start", room)
	var delta lb.Delta
	for i := range 100 {
		delta.Put = append(delta.Put, lb.Build(sizedService(i, 10, true), nil, lb.Drains{}).Frontends...)
	}
	fx.apply(delta)
	labtest.Until(t, "there is room again", room)
}

// The seed determines the flows' servers. Nobody without the seed can compute which flows go to the same server (D23).
// Balancers with the same seed select the same server.
func TestServersFollowFromTheSeed(t *testing.T) {
	t.Parallel()
	eachOnce(t, func(t *testing.T, h hookName, v6 bool) {
		const flows = 100
		servers := func(seed byte) (to [flows]netip.Addr) {
			fx := shared(t, h, v6, func(o *Options) { o.HashSeed = [32]byte{seed} })
			fx.tunnelTo(lb.TCP, nil, 21, 22)
			for i := range to {
				to[i] = fx.quick(fx.on(i, dptest.TCP, dptest.SYN))
			}
			return to
		}
		first, other := servers(1), servers(2)
		must.True(t, servers(1) == first, "two balancers with one seed choose different servers")
		same := 0
		for i := range first {
			if first[i] == other[i] {
				same++
			}
		}
		must.True(t, same <= flows*3/4,
			"with another seed %d of %d flows have the same server; want about half", same, flows)
	})
}

// filtered returns the number of bits set in the kernel's filter.
func (fx *fixture) filtered() (n int) {
	fx.t.Helper()
	f := fx.d.services.Filter
	for i := range f.Bits.MaxEntries() {
		var word uint64
		must.Do(fx.t, f.Bits.Lookup(i, &word))
		for ; word != 0; word &= word - 1 {
			n++
		}
	}
	return n
}

// The filter has only the addresses in use: after services were added and removed, and after a takeover by an agent
// with another seed.
func TestFilterHasTheAddressesInUse(t *testing.T) {
	t.Parallel()
	eachOnce(t, func(t *testing.T, h hookName, v6 bool) {
		fx := newFixture(t, h, v6, nil)
		empty := fx.filtered()
		fx.service(lb.TCP, "b1", "b2")
		must.Row(t, "bits with a VIP and two backends", empty+3, fx.filtered())
		fx.close()
		fx.o.HashSeed = [32]byte{1}
		fx.open()
		must.Row(t, "bits after a takeover", empty+3, fx.filtered())
		fx.wantReason("after a takeover", tcp(dptest.SYN)(fx), forwarded)
		fx.reset()
		fx.do(func() error { fx.d.flows.Collect(t.Context(), nil); return nil })
		must.Row(t, "bits without services", empty, fx.filtered())
	})
}

// If two addresses have the same bit, the bit stays until both are removed.
func TestFilterCounts(t *testing.T) {
	t.Parallel()
	fx := shared(t, hookTC, false, nil)
	f := fx.d.services.Filter
	addr := netip.MustParseAddr("198.51.100.1")
	before := fx.filtered()
	for step, do := range []func(netip.Addr, bpf.AddrKind) error{f.Add, f.Add, f.Remove, f.Remove} {
		must.Do(t, do(addr, bpf.AddrVIP))
		must.Row(t, step, before+[]int{1, 1, 1, 0}[step], fx.filtered())
	}
}
