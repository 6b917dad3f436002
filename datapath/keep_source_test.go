package datapath

import (
	"testing"

	"github.com/steelyard-lb/steelyard/datapath/dptest"
	"github.com/steelyard-lb/steelyard/lb"
)

// With KeepSource a server receives the address and port of the client, and its replies, which are to the client, come
// from the VIP. Packets of the server to others are left alone.
func TestKeepSource(t *testing.T) {
	each(t, func(t *testing.T, h hook, v6 bool) {
		for _, proto := range []uint8{dptest.TCP, dptest.UDP} {
			fx := newFixture(t, h, v6, nil)
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
	fx := newFixture(t, hookXDP, false, nil)
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

// exchanged is a packet of a test: its number and acknowledgement, of SCTP the initiate tag and the tag.
type exchanged struct {
	from  sender
	flags uint8 // SCTP: the type of the chunk
	seq   uint32
	ack   uint32
}

type sender int

const (
	ofClient     sender = iota
	ofFlow              // the server sends it in the flow: it leaves from the VIP
	ofConnection        // the server sends it in its connection to the client: it is left alone
)

// The server of a flow that keeps its source may have a connection to the same port of the client. A SYN in the name of
// the client, which anybody can send, does not make the packets of that connection part of the flow.
func TestKeptSourceLeavesDirectConnections(t *testing.T) {
	const syn, ack, rst, fin, far = dptest.SYN, dptest.ACK, dptest.RST, dptest.FIN, 1 << 30
	asked, answered := exchanged{ofClient, syn, 1000, 0}, exchanged{ofFlow, syn | ack, 5000, 1001}
	tcp := map[string][]exchanged{
		"before the answer": {asked, {ofConnection, ack, far, far}, {ofConnection, ack | fin, far, far},
			{ofConnection, rst, far, 0}, {ofConnection, rst | ack, far, far}, {ofConnection, syn | ack, far, far},
			answered},
		"after the answer": {asked, answered, {ofConnection, ack, far, far}, {ofConnection, rst, far, 0}},
		"a refusal":        {asked, {ofFlow, rst | ack, 0, 1001}},
		"a later refusal":  {asked, answered, {ofFlow, rst | ack, 0, 1001}},
		"a later reset":    {asked, answered, {ofFlow, rst, 5001, 0}},
		"data before the client's ACK": {asked, answered, answered, {ofFlow, ack, 5001, 1001},
			{ofFlow, ack | fin, 5001 + 14000, 1001}},
		"a forged SYN in a handshake": {asked, {ofClient, syn, far, 0}, answered, {ofClient, ack, 1001, 5001},
			{ofFlow, ack, 5001, 1001}},
		"SYN cookies": {{ofClient, syn, far, 0}, {ofFlow, syn | ack, far, far + 1}, asked, answered,
			{ofFlow, syn | ack, 2 * far, 1001}, {ofFlow, ack, far + 1, 1001}, {ofFlow, ack, 2*far + 1, 1001},
			{ofConnection, ack, 1, 1}},
	}
	const data, chunkInit, chunkInitAck, chunkAbort = 0, 1, 2, 6
	sctp := map[string][]exchanged{
		"an association": {{ofClient, chunkInit, 1000, 0}, {ofConnection, data, 0, far},
			{ofConnection, chunkAbort, 0, far}, {ofFlow, chunkInitAck, 5000, 1000},
			{ofConnection, data, 0, far}, {ofFlow, chunkAbort, 0, 1000}},
		"a refused association": {{ofClient, chunkInit, 1000, 0}, {ofFlow, chunkAbort, 0, 1000}},
	}
	each(t, func(t *testing.T, h hook, v6 bool) {
		for _, local := range []bool{false, true} {
			fx := newFixture(t, h, v6, func(o *Options) { o.Delivers = local })
			for proto, cases := range map[lb.Protocol]map[string][]exchanged{lb.TCP: tcp, lb.SCTP: sctp} {
				for name, packets := range cases {
					fx.reset()
					fx.serve(func(s *lb.Service) {
						s.Ports[0].Protocol, s.KeepSource, s.Ports[0].Backends[0].Local = proto, !local, local
					}, "b1")
					for i, x := range packets {
						if err := fx.exchange(proto, x, local); err != nil {
							t.Fatalf("%s: %s, local %t, packet %d: %v", proto, name, local, i, err)
						}
					}
				}
			}
		}
	})
}

// exchange runs a packet between the client and b1, which is local or not.
func (fx *fixture) exchange(proto lb.Protocol, x exchanged, local bool) error {
	fx.t.Helper()
	in := bare(fx.fromClient(uint8(proto), x.flags), x.seq, x.ack)
	if proto == lb.SCTP {
		in.Flags, in.Type = 0, x.flags
	}
	if x.from == ofClient {
		r := fx.run(in.Frame())
		return wrong(r.reason != forwarded, "%s", r.reason)
	}
	in.Src, in.Dst = fx.at("b1", 8080), in.Src
	want, got := in.Src, in.Src
	if x.from == ofFlow {
		want = fx.at("vip", 80)
	}
	if local {
		got = fx.out(in).Src
	} else if r := fx.run(in.Frame()); r.did == "sent" {
		got = r.out.Src
	}
	return wrong(got != want, "it left from %s; want %s", got, want)
}

// ICMP errors about packets of a connection of the client to the server are not of the flow either.
func TestKeptSourceLeavesErrorsOfDirectConnections(t *testing.T) {
	each(t, func(t *testing.T, h hook, v6 bool) {
		fx := newFixture(t, h, v6, nil)
		fx.serve(func(s *lb.Service) { s.KeepSource = true }, "b1")
		fx.run(tcp(dptest.SYN)(fx).Frame())
		for seq, want := range map[uint32]string{1000: forwarded, 1 << 30: "not_ours"} {
			about := func(fx *fixture) dptest.Packet {
				p := bare(fx.fromClient(dptest.TCP, 0), seq, 0)
				p.Dst = fx.at("b1", 8080)
				return p
			}
			if r := fx.run(icmpError("b1", about)(fx).Frame()); r.reason != want {
				t.Errorf("an error about the number %d: %s; want %s", seq, r.reason, want)
			}
		}
	})
}
