package datapath

import (
	"net/netip"
	"testing"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/steelyard-lb/steelyard/datapath/dptest"
	"github.com/steelyard-lb/steelyard/lb"
)

// A change of allow is for new flows: an open connection goes on, except where packets are forwarded by their hash
// alone, and ends when its client has no route (docs/security.md).
func TestAllowIsForNewFlows(t *testing.T) {
	t.Parallel()
	const packets = 1000
	for _, tt := range []struct {
		method    lb.Method
		algorithm lb.Algorithm
		goesOn    bool
	}{
		{lb.MethodNAT, lb.AlgorithmMaglev, true},
		{lb.MethodDSR, lb.AlgorithmRoundRobin, true},
		{lb.MethodDSR, lb.AlgorithmMaglev, false},
	} {
		fx := newFixture(t, hookTC, false, nil)
		serve := func(allow ...netip.Prefix) {
			fx.serve(func(s *lb.Service) { s.Method, s.Algorithm, s.Allow = tt.method, tt.algorithm, allow }, "b1")
		}
		serve()
		p := fx.fromClient(dptest.TCP, dptest.SYN)
		server := answer(fx.run(p.Frame()).out, dptest.SYN|dptest.ACK, 5000)
		if tt.method == lb.MethodNAT {
			fx.run(server.Frame())
		}
		p.Flags, p.Seq, p.Ack = dptest.ACK, p.Seq+1, server.Seq+1
		fx.run(p.Frame())
		serve(netip.MustParsePrefix("10.0.0.0/8"))
		sent := 0
		for range packets {
			switch r := fx.run(p.Frame()); {
			case r.did == "sent":
				sent++
			case r.reason != "not_allowed":
				t.Fatalf("%s, %s: %s", tt.method, tt.algorithm, r.reason)
			}
		}
		if tt.goesOn != (sent == packets) || !tt.goesOn && sent > packets/2 {
			t.Errorf("%s, %s: %d of %d packets were forwarded", tt.method, tt.algorithm, sent, packets)
		}
		if tt.method != lb.MethodNAT {
			for _, flags := range []uint8{dptest.SYN, dptest.RST, dptest.SYN} { // another flow from the same port
				p.Flags, p.Seq, p.Payload = flags, p.Seq+1000, nil
				if r := fx.run(p.Frame()); flags == dptest.SYN && r.reason != "not_allowed" {
					t.Errorf("%s, %s: a new flow from a port in use: %s", tt.method, tt.algorithm, r.reason)
				}
			}
			continue
		}
		fx.do(func() error {
			return netlink.RouteAdd(&netlink.Route{Dst: prefix(v4["client"] + "/32"), Type: unix.RTN_BLACKHOLE})
		})
		server.Flags = dptest.ACK
		if r := fx.run(server.Frame()); r.did != "dropped" || r.reason != "no_route" {
			t.Errorf("a reply without a route to the client: %s: %s", r.did, r.reason)
		}
	}
}

// answer is a packet of the server that p was sent to.
func answer(p dptest.Packet, flags uint8, seq uint32) dptest.Packet {
	return dptest.Packet{Src: p.Dst, Dst: p.Src, Proto: p.Proto, Flags: flags, Seq: seq, Ack: p.Seq + 1,
		Payload: []byte("answer")}
}
