package datapath

import (
	"errors"
	"flag"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"

	"github.com/steelyard-lb/steelyard/datapath/dptest"
	"github.com/steelyard-lb/steelyard/lb/lbtest/must"
)

var randomFrames = flag.Int("frames", 500_000, "how many random frames each hook and family gets")

// Headers that are truncated at any length are dropped.
func TestMalformedFrames(t *testing.T) {
	t.Parallel()
	eachOf(t, nil, func(t *testing.T, fx *fixture) {
		web(fx)
		whole := tcp(dptest.SYN)(fx).Frame()
		l3 := 34
		if fx.v6 {
			l3 = 54
		}
		fx.do(func() error {
			for n := l3; n < l3+20; n++ {
				r := fx.runRaw(whole[:n])
				must.True(t, r == "dropped", "cut to %d bytes: %s; want dropped", n, r)
			}
			return nil
		})
	})
}

// For random frames, the programs return a known verdict.
func TestRandomFrames(t *testing.T) {
	t.Parallel()
	each(t, func(t *testing.T, h hookName, v6 bool) {
		t.Parallel()
		m := newModel(t, h, v6)
		rnd := seeded(t)
		var corpus [][]byte
		for _, make := range []func(*fixture) dptest.Packet{
			tunnelFrom("router"), tunnelFrom("unknown"), icmp(8, 128), icmp(13, 135),
		} {
			corpus = append(corpus, make(m.fx).Frame())
		}
		tunnelled := dptest.Packet{Src: m.fx.at("self", 0xc001), Dst: m.fx.at("b1", 6090), Proto: dptest.UDP,
			Payload: dptest.GUE(udp(m.fx))}
		corpus = append(corpus, m.fx.report(1300, tunnelled.Frame()[14:]).Frame(),
			congested("loopback", 2, 3)(m.fx).Frame())
		for range 300 {
			corpus = append(corpus, m.packet(rnd).Frame())
		}
		corpus = append(corpus, dptest.Packet{Src: m.fx.at("client", 1), Dst: m.fx.at("vip", 91), Proto: dptest.UDP,
			Payload: make([]byte, 400)}.Fragments(7, 200)...)
		did := map[string]int{}
		m.fx.do(func() error {
			for range *randomFrames {
				f := slices.Clone(corpus[rnd.IntN(len(corpus))])
				for range rnd.IntN(5) {
					mutate(rnd, f)
				}
				if rnd.IntN(4) == 0 {
					f = f[:14+rnd.IntN(len(f)-13)]
				}
				did[m.fx.runRaw(f)]++
			}
			return nil
		})
		t.Log(did)
		must.True(t, did["sent"] > 0 && did["dropped"] > 0 && did["passed"] > 0, "%v; want some of each", did)
	})
}

// mutate changes a byte or word of a frame after its MAC addresses, often to a boundary value.
func mutate(rnd *rand.Rand, f []byte) {
	at := 12 + rnd.IntN(len(f)-12)
	switch rnd.IntN(4) {
	case 0:
		f[at] = byte(rnd.Uint32())
	case 1:
		f[at] ^= 1 << rnd.IntN(8)
	case 2:
		f[at] = []byte{0, 1, 4, 5, 6, 17, 41, 43, 44, 47, 58, 60, 132, 0x7f, 0x80, 0xff}[rnd.IntN(16)]
	case 3:
		copy(f[at:], []byte{0xff, 0xff, 0xff, 0xff}[:1+rnd.IntN(4)])
	}
}

// runRaw runs a frame and returns the verdict. An aborted program fails the test. Call it on the balancer's thread.
func (fx *fixture) runRaw(frame []byte) string {
	fx.t.Helper()
	prog, opts := fx.d.objects.SyTcIn, ebpf.RunOptions{Data: frame, Context: fx.skb(0)}
	if fx.hook == hookXDP {
		prog, opts.Context = fx.d.objects.SyXdp, fx.xdp(frame)
	}
	ret, err := prog.Run(&opts)
	if fx.hook == hookTC && len(frame) < 54 && errors.Is(err, unix.EINVAL) {
		return "refused by the kernel"
	}
	must.Need(fx.t, err == nil, "run %x: %v", frame, err)
	did := fx.hook.verdicts()[ret]
	must.Need(fx.t, did != "", "the program returned %d for %x", ret, frame)
	return did
}
