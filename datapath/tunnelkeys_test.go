package datapath

import (
	"bytes"
	"encoding/binary"
	"net/netip"
	"slices"
	"testing"

	"github.com/cilium/ebpf"

	"github.com/steelyard-lb/steelyard/datapath/dptest"
	"github.com/steelyard-lb/steelyard/datapath/internal/bpf"
	"github.com/steelyard-lb/steelyard/datapath/internal/table"
	"github.com/steelyard-lb/steelyard/lb"
	"github.com/steelyard-lb/steelyard/lb/lbtest/must"
)

// key returns a key for tests.
func key(name string) []byte { return []byte("a key for tests: " + name) }

// keys sets the keys: the first is for sending, and all are accepted.
func (fx *fixture) keys(required bool, names ...string) {
	fx.t.Helper()
	k := TunnelKeys{Required: required}
	for _, name := range names {
		k.Accept = append(k.Accept, key(name))
	}
	if len(names) > 0 {
		k.Send = k.Accept[0]
	}
	must.Do(fx.t, fx.d.SetTunnelKeys(k))
}

// withToken returns private data without a list of nodes, with a key's token.
func (fx *fixture) withToken(name string) []byte {
	b := fx.chained(false)
	binary.LittleEndian.PutUint64(b[4:], table.TunnelToken(key(name)))
	return b
}

// fromNode is a packet that node b2 sends through a tunnel.
func (fx *fixture) fromNode(in dptest.Packet, private ...byte) dptest.Packet {
	return dptest.Packet{Src: fx.at("b2", 50000), Dst: fx.at("self", 6090), Proto: dptest.UDP,
		Payload: dptest.GUE(in, private...)}
}

// A packet from a node's address need not come from the node, because masqueraded pods also have that address. Both
// kinds of destination, a VIP and an address of this node, require the key.
func TestTunnelPacketsNeedTheKey(t *testing.T) {
	t.Parallel()
	each(t, func(t *testing.T, h hookName, v6 bool) {
		for _, delivers := range []bool{true, false} {
			fx := shared(t, h, v6, func(o *Options) {
				o.Delivers, o.TunnelSources = delivers, []netip.Prefix{netip.MustParsePrefix("::/0"),
					netip.MustParsePrefix("0.0.0.0/0")}
			})
			in := fx.fromClient(dptest.TCP, dptest.SYN)
			if delivers {
				fx.nodes(lb.TCP, "self")
			} else {
				in.Dst = fx.at("loopback", 80)
			}
			reason := func(private ...byte) string {
				t.Helper()
				p := fx.fromNode(in, private...)
				before := fx.counts()
				did, _ := fx.runXDP(p.Frame())
				if fx.hook == hookTC || did == "passed" && delivers {
					did, _ = fx.runTC(p.Frame())
				}
				for v, n := range fx.counts() {
					if n > before[v] && v.Reason != "forwarded" && v.Reason != "decapsulated" {
						return did + ": " + v.Reason
					}
				}
				return did
			}
			is := func(when, got, want string) {
				t.Helper()
				must.True(t, got == want, "delivers %t: %s: %s; want %s", delivers, when, got, want)
			}
			const refused = "dropped: tunnel_key_mismatch"
			is("no key is set", reason(), "passed")
			fx.keys(false, "current")
			is("a key is set but not required", reason(), "passed")
			fx.keys(true, "current", "previous", "next")
			is("no private data", reason(), refused)
			is("a list without a token", reason(fx.chained(false, "router")...), refused)
			is("the token of an unknown key", reason(fx.withToken("unknown")...), refused)
			is("cut off", reason(fx.withToken("current")[:8]...), refused)
			wrong := fx.withToken("current")
			wrong[0]++
			is("another magic number", reason(wrong...), refused)
			for _, name := range []string{"current", "previous", "next"} {
				is(name, reason(fx.withToken(name)...), "passed")
			}
			list := fx.chained(true, "router")
			copy(list, fx.withToken("current"))
			is("a token and a list", reason(list...), "passed")
			fx.keys(true, "current")
			is("a key that is accepted no longer", reason(fx.withToken("previous")...), refused)
			is("an unused place for a key", reason(fx.chained(false)...), refused)
			fx.keys(false)
			is("keys are removed", reason(), "passed")
		}
	})
}

// tokenOf returns the token that a packet carries, or 0.
func tokenOf(p dptest.Packet) uint64 {
	if len(p.Private) < privateHead {
		return 0
	}
	return binary.LittleEndian.Uint64(p.Private[4:])
}

// counted returns how many packets are dropped for a reason while f runs.
func (fx *fixture) counted(reason string, f func()) uint64 {
	fx.t.Helper()
	v := Verdict{"drop", reason}
	before := fx.counts()[v]
	f()
	return fx.counts()[v] - before
}

// Packets between nodes carry the first key's token, to the first node and to the next one.
func TestTunnelPacketsCarryTheKey(t *testing.T) {
	t.Parallel()
	each(t, func(t *testing.T, h hookName, v6 bool) {
		fx := shared(t, h, v6, func(o *Options) { o.Delivers = true })
		fx.do(func() error { return fx.sources("b2", "router") })
		fx.nodes(lb.TCP, "b2")
		in := fx.fromClient(dptest.TCP, dptest.SYN)
		want := func(when string, r result, name string) {
			t.Helper()
			must.True(t, r.did == "sent" && tokenOf(r.out) == table.TunnelToken(key(name)),
				"%s: %s: %s, token %#x", when, r.did, r.reason, tokenOf(r.out))
		}
		r := fx.run(in.Frame())
		must.True(t, r.did == "sent" && tokenOf(r.out) == 0 && len(r.out.Private) == privateHead,
			"without keys: %s: private data %x", r.did, r.out.Private)
		fx.keys(true, "one", "two")
		want("a SYN", fx.run(in.Frame()), "one")
		fx.nodes(lb.TCP, "router", "-b2")
		in.Flags = dptest.ACK
		r = fx.run(in.Frame())
		want("with a list", r, "one")
		must.True(t, len(r.out.Private) != privateHead, "no list: %x", r.out.Private)
		fx.keys(true, "two", "one")
		want("after a rotation", fx.run(in.Frame()), "two")
		if h == hookTC {
			list := fx.chained(false, "router")
			copy(list[4:], fx.withToken("one")[4:])
			did, frame := fx.runTC(fx.fromNode(in, list...).Frame())
			out := must.Get(dptest.Parse(frame))(t)
			want("relayed", result{did: did, out: out}, "two")
		}
	})
}

// A server behind a GUE tunnel receives the token if it is one of tunnel_sources, and so runs Steelyard. Others receive
// plain GUE without a secret of ours.
func TestServersGetTheKeyWhenTheyAreTunnelSources(t *testing.T) {
	t.Parallel()
	eachOnce(t, func(t *testing.T, h hookName, v6 bool) {
		fx := newFixture(t, h, v6, func(o *Options) {
			o.TunnelSources = []netip.Prefix{hostPrefix("192.0.2.21"), hostPrefix("2001:db8::21")}
		})
		fx.keys(true, "one")
		for _, b := range []string{"b1", "b2"} {
			fx.serve(tunnel(lb.EncapGUE), b)
			r := fx.run(fx.fromClient(dptest.TCP, dptest.SYN).Frame())
			must.Need(t, r.did == "sent" && r.out.Dst.Addr() == fx.addr(b), "%s: %s: %s", b, r.did, r.reason)
			must.True(t, tokenOf(r.out) == table.TunnelToken(key("one")) == (b == "b1"),
				"%s: private data %x", b, r.out.Private)
			must.True(t, b != "b2" || len(r.out.Private) == 0, "%s: private data %x; want none", b, r.out.Private)
		}
		fx.close()
		fx.o.TunnelSources = nil
		fx.open()
		fx.serve(tunnel(lb.EncapGUE), "b1")
		r := fx.run(fx.fromClient(dptest.TCP, dptest.SYN).Frame())
		must.True(t, r.did == "sent" && len(r.out.Private) == 0,
			"no longer a tunnel source: %s: private data %x", r.did, r.out.Private)
	})
}

// Health checks take the path of traffic, so they carry the token as well.
func TestProbesCarryTheKey(t *testing.T) {
	t.Parallel()
	fx := newFixture(t, hookTC, false, func(o *Options) { o.TunnelSources = []netip.Prefix{hostPrefix("192.0.2.22")} })
	fx.keys(true, "one")
	check := func(b string, want bool) {
		t.Helper()
		did, frame := fx.runOut(fx.fromClient(dptest.TCP, dptest.SYN).Frame(), fx.probeMark(b, lb.MethodTunnel))
		out, err := dptest.Parse(frame)
		must.True(t, err == nil && did == "sent" && (tokenOf(out) == table.TunnelToken(key("one"))) == want,
			"%s: %s (%v), private data %x", b, did, err, out.Private)
	}
	check("b1", false)
	check("b2", true)
	fx.do(func() error { return fx.d.SetTunnelSources([]netip.Addr{fx.addr("b1")}) }) // a node of a cluster
	check("b1", true)
	check("b2", true)
}

// The delivering node also checks the allowed sources, because a tunnel packet need not come from a node that did.
func TestDecapsulatedPacketsAreFromAllowedSources(t *testing.T) {
	t.Parallel()
	for _, v6 := range []bool{false, true} {
		for _, proto := range []lb.Protocol{lb.TCP, lb.UDP} {
			fx := shared(t, hookTC, v6, func(o *Options) { o.Delivers = true })
			fx.do(func() error { return fx.sources("b2") })
			fx.keys(true, "one")
			is := func(when, from string, flags uint8, want string) {
				t.Helper()
				in := fx.fromClient(uint8(proto), flags)
				in.Src = fx.at(from, 40000)
				relayed := fx.chained(true)
				copy(relayed[4:], fx.withToken("one")[4:])
				for _, private := range [][]byte{fx.withToken("one"), relayed} {
					var did string
					frame := fx.fromNode(in, private...).Frame()
					refused := fx.counted("not_allowed", func() { did, _ = fx.runTC(frame) })
					must.True(t, did == want && refused == uint64(bpf.Truth(want == "dropped")),
						"%s, %s: %s, not_allowed: %d; want %s", proto, when, did, refused, want)
				}
			}
			all := []netip.Prefix{netip.PrefixFrom(fx.addr("client"), fx.addr("client").BitLen())}
			fx.spreadAllowed(proto, false, all, "self")
			is("an allowed source", "client", dptest.SYN, "passed")
			is("another source", "router", dptest.SYN, "dropped")
			none := []netip.Prefix{netip.PrefixFrom(fx.addr("far"), fx.addr("far").BitLen())}
			fx.spreadAllowed(proto, false, none, "self")
			is("a known flow", "client", 0, "passed")
		}
	}
}

// The tc programs mark their tunnel packets. sy_tc_out lets marked packets pass, and removes the mark.
func TestTunnelPacketsAreMarked(t *testing.T) {
	t.Parallel()
	for _, v6 := range []bool{false, true} {
		fx := newFixture(t, hookTC, v6, func(o *Options) {
			o.TunnelSources = []netip.Prefix{hostPrefix("192.0.2.22"), hostPrefix("2001:db8::22")}
		})
		fx.serve(tunnel(lb.EncapGUE), "b1")
		probe := fx.probeMark("b1", lb.MethodTunnel)
		frame := fx.fromClient(dptest.TCP, dptest.SYN).Frame()
		markAfter := func(prog *ebpf.Program, frame []byte, mark uint32) (after uint32, out []byte) {
			t.Helper()
			skb := make([]byte, 192)
			opts := ebpf.RunOptions{
				Data: frame, DataOut: make([]byte, len(frame)+256), Context: fx.skb(mark), ContextOut: skb,
			}
			fx.do(func() error { _, err := prog.Run(&opts); return err })
			return binary.NativeEndian.Uint32(skb[8:]), opts.DataOut
		}
		o := fx.d.objects
		for name, in := range map[string]func() (uint32, []byte){
			"of a client":       func() (uint32, []byte) { return markAfter(o.SyTcIn, frame, 0) },
			"of a health check": func() (uint32, []byte) { return markAfter(o.SyTcOut, frame, probe) },
		} {
			mark, out := in()
			must.True(t, mark == 0x53580000, "%s: mark %#x", name, mark)
			onWire, _ := markAfter(o.SyTcOut, out, mark)
			must.True(t, onWire == 0, "%s: mark %#x on the wire", name, onWire)
		}
	}
}

func TestTunnelKeysThatCannotBe(t *testing.T) {
	for name, k := range map[string]TunnelKeys{
		"four":          {Accept: [][]byte{{1}, {2}, {3}, {4}}},
		"none accepted": {Send: []byte{1}, Required: true},
	} {
		_, err := k.Encode()
		must.True(t, err != nil, "%s: no error", name)
	}
	a, b := table.TunnelToken([]byte("a")), table.TunnelToken([]byte("b"))
	must.True(t, a != b && a != 0, "tokens %#x and %#x", a, b)
}

// No frame without an accepted token is decapsulated, whatever else changes.
func TestRandomTunnelPacketsNeedTheKey(t *testing.T) {
	t.Parallel()
	eachOf(t, acceptTunnels, func(t *testing.T, fx *fixture) {
		fx.keys(true, "a")
		in := fx.fromClient(dptest.TCP, dptest.SYN)
		in.Dst = fx.at("loopback", 80)
		private := fx.withToken("a")
		whole, token := fx.fromNode(in, private...).Frame(), private[4:12]
		rnd := seeded(t)
		decapsulated, refused := 0, 0
		for range 3000 {
			f := slices.Clone(whole)
			for range 1 + rnd.IntN(3) {
				mutate(rnd, f)
			}
			if at := bytes.Index(f, token); at >= 0 && rnd.IntN(2) == 0 {
				f[at+rnd.IntN(8)] ^= 1 << rnd.IntN(8)
			}
			_, out := fx.first(f)
			switch has := bytes.Contains(f, token); {
			case len(out) >= len(f):
				refused++
			case has:
				decapsulated++
			default:
				t.Fatalf("decapsulated without the token: %x", f)
			}
		}
		must.True(t, refused > 0 && decapsulated > 0,
			"%d were decapsulated, %d refused; want some of each", decapsulated, refused)
	})
}
