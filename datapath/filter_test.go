package datapath

import (
	"net/netip"
	"testing"

	"github.com/steelyard-lb/steelyard/datapath/dptest"
	"github.com/steelyard-lb/steelyard/datapath/internal/bpf"
	"github.com/steelyard-lb/steelyard/lb"
)

// filtered returns the bits of the filter that are set in the kernel.
func (fx *fixture) filtered() (n int) {
	fx.t.Helper()
	f := fx.d.services.Filter
	for i := range f.Bits.MaxEntries() {
		var word uint64
		if err := f.Bits.Lookup(i, &word); err != nil {
			fx.t.Fatal(err)
		}
		for ; word != 0; word &= word - 1 {
			n++
		}
	}
	return n
}

// The filter has the addresses in use and no others: after services came and went, and after a takeover by an agent
// with another seed.
func TestFilterHasTheAddressesInUse(t *testing.T) {
	t.Parallel()
	eachOnce(t, func(t *testing.T, h hookName, v6 bool) {
		fx := newFixture(t, h, v6, nil)
		empty := fx.filtered()
		fx.service(lb.TCP, "b1", "b2")
		if n := fx.filtered(); n != empty+3 {
			t.Errorf("%d bits with a VIP and two backends; want %d", n, empty+3)
		}
		fx.close()
		fx.o.HashSeed = [32]byte{1}
		fx.open()
		if n := fx.filtered(); n != empty+3 {
			t.Errorf("%d bits after a takeover; want %d", n, empty+3)
		}
		if r := fx.run(tcp(dptest.SYN)(fx).Frame()); r.reason != "forwarded" {
			t.Errorf("after a takeover: %s, %s", r.did, r.reason)
		}
		fx.reset()
		fx.do(func() error { fx.d.flows.Collect(t.Context(), nil); return nil })
		if n := fx.filtered(); n != empty {
			t.Errorf("%d bits without services; want %d", n, empty)
		}
	})
}

// Two addresses with one bit: the bit stays until both are removed.
func TestFilterCounts(t *testing.T) {
	t.Parallel()
	fx := shared(t, hookTC, false, nil)
	f := fx.d.services.Filter
	addr := netip.MustParseAddr("198.51.100.1")
	before := fx.filtered()
	for step, do := range []func(netip.Addr, bpf.AddrKind) error{f.Add, f.Add, f.Remove, f.Remove} {
		if err := do(addr, bpf.AddrVIP); err != nil {
			t.Fatal(err)
		}
		if n, want := fx.filtered(), before+[]int{1, 1, 1, 0}[step]; n != want {
			t.Errorf("step %d: %d bits; want %d", step, n, want)
		}
	}
}
