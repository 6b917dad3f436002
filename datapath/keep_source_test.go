package datapath

import (
	"testing"

	"github.com/steelyard-lb/steelyard/datapath/dptest"
	"github.com/steelyard-lb/steelyard/lb"
)

// With KeepSource a server receives the address and port of the client, and its replies, which are to the client, come
// from the VIP. Packets of the server to others are left alone.
func TestKeepSource(t *testing.T) {
	t.Parallel()
	eachOnce(t, func(t *testing.T, h hookName, v6 bool) {
		for _, proto := range []uint8{dptest.TCP, dptest.UDP} {
			fx := shared(t, h, v6, nil)
			fx.serve(func(s *lb.Service) { s.Ports[0].Protocol, s.KeepSource = lb.Protocol(proto), true }, "b1")
			for step, flags := range []uint8{dptest.SYN, dptest.SYN | dptest.ACK, dptest.ACK, dptest.ACK} {
				in := fx.fromClient(proto, flags)
				src, dst := in.Src, fx.at("b1", 8080)
				if step%2 == 1 {
					in = dptest.Packet{Src: dst, Dst: in.Src, Proto: proto, Flags: flags, Seq: 5000, Ack: 1001}
					src, dst = fx.at("vip", 80), in.Dst
				}
				r := fx.run(in.Frame())
				if r.did != "sent" || r.reason != "forwarded" || r.out.Src != src || r.out.Dst != dst {
					t.Fatalf("%d, step %d: %s, %s, from %s to %s; want %s to %s", proto, step, r.did, r.reason,
						r.out.Src, r.out.Dst, src, dst)
				}
			}
			other := dptest.Packet{Src: fx.at("b1", 8080), Dst: fx.at("client", 50000), Proto: proto, Flags: dptest.ACK}
			if r := fx.run(other.Frame()); r.did != "passed" || r.reason != "not_ours" {
				t.Errorf("another packet of the server: %s, %s", r.did, r.reason)
			}
		}
	})
}

// A client that uses one port towards two VIPs with one server gets another port for the second flow.
func TestKeepSourceOfTwoFlows(t *testing.T) {
	t.Parallel()
	fx := shared(t, hookXDP, false, nil)
	keep := func(port uint16) func(*lb.Service) {
		return func(s *lb.Service) {
			s.Name = map[uint16]string{80: "a", 81: "b"}[port]
			s.Ports[0].Port.Port, s.KeepSource = port, true
		}
	}
	fx.serve(keep(80), "b1")
	fx.serve(keep(81), "b1")
	first, second := fx.fromClient(dptest.TCP, dptest.SYN), fx.fromClient(dptest.TCP, dptest.SYN)
	second.Dst = fx.at("vip", 81)
	a, b := fx.run(first.Frame()).out, fx.run(second.Frame()).out
	if a.Src != first.Src || b.Src.Addr() != first.Src.Addr() || b.Src.Port() == a.Src.Port() {
		t.Errorf("the server receives the flows from %s and %s", a.Src, b.Src)
	}
}
