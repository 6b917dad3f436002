package datapath

import (
	"net/netip"
	"testing"

	"github.com/steelyard-lb/steelyard/datapath/dptest"
	"github.com/steelyard-lb/steelyard/datapath/internal/bpf"
	"github.com/steelyard-lb/steelyard/lb"
)

// deliver puts VIP:80 to port 8080 of b1, which runs on this node; change may modify the service.
func (fx *fixture) deliver(change func(*lb.Service)) {
	fx.t.Helper()
	fx.serve(func(s *lb.Service) {
		s.Ports[0].Backends[0].Local = true
		change(s)
	}, "b1")
}

// out runs a packet of a local backend through sy_tc_out.
func (fx *fixture) out(p dptest.Packet) dptest.Packet {
	fx.t.Helper()
	did, frame := fx.runOut(p.Frame(), 0)
	out, err := dptest.Parse(frame)
	if did != "passed" || err != nil {
		fx.t.Fatalf("the packet was %s: %v", did, err)
	}
	return out
}

// A local backend receives packets from the client's address, and the client from the VIP.
func TestDeliversToLocalBackends(t *testing.T) {
	t.Parallel()
	eachOf(t, func(o *Options) { o.Delivers = true }, func(t *testing.T, fx *fixture) {
		for _, proto := range []lb.Protocol{lb.TCP, lb.UDP} {
			fx.reset()
			fx.deliver(func(s *lb.Service) { s.Ports[0].Protocol = proto })
			there := func(flags uint8) dptest.Packet {
				return fx.fromClient(uint8(proto), flags&(255*uint8(bpf.Truth(proto == lb.TCP))))
			}
			back := func(flags uint8) dptest.Packet {
				p := there(flags)
				p.Src, p.Dst, p.Seq, p.Ack = fx.at("b1", 8080), p.Src, 5*p.Seq, 0
				return p
			}
			for i, flags := range []uint8{dptest.SYN, dptest.ACK, dptest.ACK} {
				in := there(flags)
				r := fx.run(in.Frame())
				if r.did != "passed" || r.reason != "forwarded" {
					t.Fatalf("%s, packet %d: %s: %s", proto, i, r.did, r.reason)
				}
				want := in
				want.Dst, want.TTL = fx.at("b1", 8080), 65
				if err := onlyHops(want, r.out); err != nil {
					t.Errorf("%s, packet %d: %v", proto, i, err)
				}
				answer := back(dptest.ACK)
				if i == 0 {
					answer = back(dptest.SYN | dptest.ACK)
				}
				want = answer
				want.Src, want.TTL = fx.at("vip", 80), 65
				if err := onlyHops(want, fx.out(answer)); err != nil {
					t.Errorf("%s, answer %d: %v", proto, i, err)
				}
			}
			if err := fx.confirmed().want(1, 1); err != nil {
				t.Errorf("%s: %v", proto, err)
			}
		}
		other := dptest.Packet{Src: fx.at("b1", 8080), Dst: fx.at("client", 41000), Proto: dptest.TCP,
			Flags: dptest.ACK}
		if out := fx.out(other); out.Src != other.Src || out.Dst != other.Dst {
			t.Errorf("an unrelated packet was sent as %+v", out)
		}
	})
}

// A client uses one port towards two VIPs with the same local server: the server receives two distinct flows, and each
// reply is translated to its VIP.
func TestTwoVIPsWithOneLocalServer(t *testing.T) {
	t.Parallel()
	eachOf(t, func(o *Options) { o.Delivers = true }, func(t *testing.T, fx *fixture) {
		fx.deliver(func(*lb.Service) {})
		fx.deliver(func(s *lb.Service) { s.Name, s.VIPs = "other", []netip.Addr{fx.addr("elsewhere")} })
		seen := map[netip.AddrPort]bool{}
		for _, vip := range []string{"vip", "elsewhere"} {
			p := fx.fromClient(dptest.TCP, dptest.SYN)
			p.Dst = fx.at(vip, 80)
			r := fx.run(p.Frame())
			if r.did != "passed" || r.out.Src.Addr() != p.Src.Addr() || seen[r.out.Src] {
				t.Fatalf("%s: %s: %s, from %s", vip, r.did, r.reason, r.out.Src)
			}
			seen[r.out.Src] = true
			answer := fx.out(dptest.Packet{Src: r.out.Dst, Dst: r.out.Src, Proto: dptest.TCP,
				Flags: dptest.SYN | dptest.ACK})
			if answer.Src != p.Dst || answer.Dst != p.Src {
				t.Errorf("%s: the answer left from %s to %s", vip, answer.Src, answer.Dst)
			}
		}
	})
}
