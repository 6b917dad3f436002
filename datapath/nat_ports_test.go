package datapath

import (
	"errors"
	"fmt"
	"testing"
	"time"

	"github.com/steelyard-lb/steelyard/datapath/dptest"
	"github.com/steelyard-lb/steelyard/datapath/internal/bpf"
	"github.com/steelyard-lb/steelyard/lb"
	"github.com/steelyard-lb/steelyard/lb/lbtest/must"
)

// stamped returns the packet with a sequence number and a timestamp.
func stamped(p dptest.Packet, seq, timestamp uint32) dptest.Packet {
	p.Seq, p.Timestamp = seq, timestamp
	return p
}

// closedBy closes the fixture's connection: each side sends FIN, the server first or last.
func (fx *fixture) closedBy(server bool) {
	fx.t.Helper()
	fins := []dptest.Packet{fx.reply(dptest.FIN | dptest.ACK),
		stamped(fx.fromClient(dptest.TCP, dptest.FIN|dptest.ACK), 1005, 7000)}
	fins[0].Seq, fins[0].Ack = 5001, 1005
	if fins[1].Ack = 5008; !server {
		fins[1].Ack = 5001
		fins[0], fins[1] = fins[1], fins[0]
	}
	fx.went(fins[0])
	fx.went(fins[1])
}

// A source port rests while the server may have its connection in TIME_WAIT, unless the server must accept the SYN (RFC
// 6191). There is only one port.
func TestSourcePortsRest(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct {
		name           string
		serverFirst    bool
		age            time.Duration
		seq, timestamp uint32
		reason         string
	}{
		{"server first, at once", true, 0, 900, 0, "snat_exhausted"},
		{"server first, after the short rest", true, 12 * time.Second, 900, 0, "snat_exhausted"},
		{"server first, after TIME_WAIT", true, 67 * time.Second, 900, 0, "forwarded"},
		{"server first, the SYN has a later number", true, 0, 1100, 0, "forwarded"},
		{"server first, the SYN has a later timestamp", true, 0, 900, 7001, "forwarded"},
		{"server first, the SYN has the same timestamp", true, 0, 900, 7000, "snat_exhausted"},
		{"server first, an earlier timestamp and a later number", true, 0, 1100, 6999, "snat_exhausted"},
		{"client first, at once", false, 0, 1100, 7001, "snat_exhausted"},
		{"client first, it has acknowledged all", false, -1, 900, 0, "forwarded"},
		{"client first, after the short rest", false, 12 * time.Second, 900, 0, "forwarded"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			fx := shared(t, hookTC, false, onePort)
			fx.service(lb.TCP, "b1")
			connect(fx)
			fx.closedBy(tt.serverFirst)
			if tt.age < 0 { // the server has forgotten the connection
				last := stamped(fx.fromClient(dptest.TCP, dptest.ACK), 1011, 0)
				last.Ack, last.Payload = 5008, nil
				fx.run(last.Frame())
			}
			fx.age(max(tt.age, 0), max(tt.age, 0))
			syn := fx.fromClient(dptest.TCP, dptest.SYN)
			syn.Src = fx.at("client", 40001)
			fx.wantReason("a new client", stamped(syn, tt.seq, tt.timestamp), tt.reason)
		})
	}
}

// When snat_ports changes, flows keep their source ports, and answers reach the client. New flows get one of the new
// ports.
func TestSNATPortsChange(t *testing.T) {
	t.Parallel()
	eachOnce(t, func(t *testing.T, h hookName, v6 bool) {
		fx := newFixture(t, h, v6, nil)
		established(fx)
		port := fx.last.Src.Port()
		fx.close()
		fx.o.SNATPorts = []PortRange{{2000, 2999}}
		fx.open()
		fx.went(fx.fromClient(dptest.TCP, dptest.ACK))
		must.Row(t, "the port of the flow", port, fx.last.Src.Port())
		must.Row(t, "an answer went to", fx.at("client", 40000), fx.run(fx.reply(dptest.ACK).Frame()).out.Dst)
		fx.went(fx.on(1, dptest.TCP, dptest.SYN))
		must.Row(t, "the thousands of the port of a new flow", 2, fx.last.Src.Port()/1000)
	})
}

// If a client has received everything, the source port of its connection does not rest longer because a newer
// connection from the same client port has replaced the client's entry. There is only one port.
func TestSourcePortOfAClientThatCameBack(t *testing.T) {
	t.Parallel()
	fx := shared(t, hookTC, false, onePort)
	fx.service(lb.TCP, "b1")
	connect(fx)
	fx.closedBy(true)
	var k bpf.ClientKey
	clients := fx.d.objects.SyStreamClients
	must.Do(t, errors.Join(clients.NextKey(nil, &k), clients.Delete(&k)))
	syn := stamped(fx.on(1, dptest.TCP, dptest.SYN), 1100, 7001)
	fx.wantReason("the SYN of another client", syn, forwarded)
}

// If a client's first choices of a source port are all in use, it gets another one, and even the last free port is
// found. If a server has none, the flow goes to another server, with which the handshake continues.
func TestEverySourcePortIsUsed(t *testing.T) {
	t.Parallel()
	const ports = 20
	few := func(o *Options) { o.SNATPorts = []PortRange{{61000, 61000 + ports - 1}} }
	eachOf(t, few, func(t *testing.T, fx *fixture) {
		fx.service(lb.TCP, "b1")
		for flow := range ports + 5 {
			if flow == ports {
				fx.service(lb.TCP, "b1", "b2")
			}
			r := fx.run(fx.on(flow, dptest.TCP, dptest.SYN).Frame())
			must.Need(t, r.reason == forwarded, "flow %d of %d: the SYN is %s: %s", flow, ports, r.did, r.reason)
			fx.last = r.out
			again := fx.run(fx.on(flow, dptest.TCP, dptest.SYN).Frame())
			must.Need(t, again.did == "sent" && again.out.Src == r.out.Src,
				"flow %d: the SYN again is %s from %s, after %s", flow, again.did, again.out.Src, r.out.Src)
			ack := fx.on(flow, dptest.TCP, dptest.ACK)
			back := fx.run(fx.reply(dptest.SYN | dptest.ACK).Frame())
			must.Need(t, back.out.Dst == ack.Src, "flow %d: the SYN-ACK is %s to %s", flow, back.did, back.out.Dst)
			got := fx.run(ack.Frame())
			must.Need(t, got.reason == forwarded && got.out.Src == r.out.Src,
				"flow %d: the ACK is %s from %s; want %s", flow, got.reason, got.out.Src, r.out.Src)
		}
	})
}

// A server that sends SYN cookies answers each SYN with another sequence number. Forged SYNs before and after the
// client's SYN do not keep the client's ACK from its server. A RST with the number of a forged SYN does not end the
// handshake.
func TestForgedSYNsAndSYNCookies(t *testing.T) {
	t.Parallel()
	for _, h := range []hookName{hookTC, hookXDP} {
		fx := shared(t, h, false, nil)
		for _, x := range []struct{ before, after int }{{0, 1}, {0, 3}, {1, 0}} {
			fx.reset()
			fx.service(lb.TCP, "b1")
			asked := func(seq, cookie uint32) {
				t.Helper()
				for _, p := range []func(*fixture) dptest.Packet{tcp(dptest.SYN), replies(dptest.SYN | dptest.ACK)} {
					in := p(fx)
					if in.Payload, in.Seq, in.Ack = nil, seq, 0; in.Flags&dptest.ACK > 0 {
						in.Seq, in.Ack = cookie, seq+1
					}
					fx.went(in)
				}
			}
			for i := range x.before {
				asked(1<<30, 1<<28*uint32(i+1))
			}
			asked(1000, 5000)
			for i := range x.after {
				asked(1<<30+uint32(i), 1<<29*uint32(i+1))
			}
			if x.after > 0 {
				fx.run(bare(fx.fromClient(dptest.TCP, dptest.RST), 1<<30+1, 0).Frame())
			}
			fx.wantReason(fmt.Sprintf("%s: %+v: a number of nobody", h, x),
				bare(fx.fromClient(dptest.TCP, dptest.ACK), 1001, 1<<31), "bad_ack")
			fx.wantReason(fmt.Sprintf("%s: %+v: the ACK of the client", h, x),
				bare(fx.fromClient(dptest.TCP, dptest.ACK), 1001, 5001), forwarded)
			must.Do(t, fx.confirmed().want(1, 1))
		}
	}
}

// A client that finds the flow table full is reset. The server does not know this and repeats its SYN-ACK, and the
// client's reset in response ends the connection there. Later connections find entries that have become free.
func TestHandshakeWithAFullTable(t *testing.T) {
	t.Parallel()
	eachOf(t, func(o *Options) { o.MaxFlows = 1 }, func(t *testing.T, fx *fixture) {
		fx.service(lb.TCP, "b1")
		fill(fx)
		fx.went(bare(fx.fromClient(dptest.TCP, dptest.SYN), 1000, 0))
		answer := bare(fx.reply(dptest.SYN|dptest.ACK), 5000, 1001)
		fx.went(answer)
		ack := bare(fx.fromClient(dptest.TCP, dptest.ACK), 1001, 5001)
		for range 2 {
			r := fx.run(ack.Frame())
			must.Need(t, r.did == "sent" && r.reason == "flows_full", "the ACK: %s: %s", r.did, r.reason)
			must.Do(t, aReset(fx, ack, r.out))
		}
		fx.went(answer)
		must.Row(t, "the reset went to", fx.addr("b1"), fx.went(bare(fx.fromClient(dptest.TCP, dptest.RST), 1001, 0)))
		for _, f := range fx.flowsIn(fx.d.objects.FlowTables()[0]).servers {
			must.True(t, f.F.State == uint8(bpf.FlowClosed), "the half-open flow is in state %d", f.F.State)
		}
		fx.clear("sy_stream_servers")
		must.Row(t, "a connection when there is room", "", fx.openFlow(lb.TCP, 1))
	})
}

// SCTP servers answer each INIT with another tag. The association continues with its client's tags, and its ABORT ends
// the flow.
func TestForgedINITs(t *testing.T) {
	t.Parallel()
	const chunkInit, chunkInitAck, chunkAbort, chunkCookieEcho, chunkCookieAck = 1, 2, 6, 10, 11
	for name, forgedFirst := range map[string]bool{"before": true, "after": false} {
		fx := shared(t, hookTC, false, nil)
		fx.service(lb.SCTP, "b1")
		send := func(p dptest.Packet, kind uint8, seq, tag uint32) {
			t.Helper()
			p.Type, p.Seq, p.Ack = kind, seq, tag
			fx.wantReason(fmt.Sprintf("%s: chunk %d with the tag %d", name, kind, tag), p, forwarded)
		}
		asked := func(client, server uint32) {
			t.Helper()
			send(fx.fromClient(dptest.SCTP, 0), chunkInit, client, 0)
			send(fx.reply(0), chunkInitAck, server, client)
		}
		if forgedFirst {
			asked(77, 4000)
		}
		asked(1000, 5000)
		if !forgedFirst {
			asked(77, 4000)
		}
		send(fx.fromClient(dptest.SCTP, 0), chunkCookieEcho, 0, 5000)
		answer := fx.reply(0)
		send(answer, chunkCookieAck, 0, 1000)
		send(answer, chunkAbort, 0, 1000)
		for _, f := range fx.confirmed().servers {
			must.True(t, f.F.State == uint8(bpf.FlowClosed),
				"%s: after an ABORT the flow is in state %d", name, f.F.State)
		}
		must.Do(t, fx.confirmed().want(1, 1))
	}
}

// every returns frames whose sequence numbers are this far apart, so that one of them is near any number.
func every(distance uint32, p dptest.Packet) (frames [][]byte) {
	for seq := uint64(0); seq < 1<<32; seq += uint64(distance) {
		p.Seq = uint32(seq) + 1<<20
		frames = append(frames, p.Frame())
	}
	return frames
}

// An attacker who knows the addresses and ports of an idle connection, but no sequence numbers, cannot end it with a
// few hundred packets. Their numbers are outside the window of the receiver, which stays silent.
func TestBlindPacketsEndNoIdleConnection(t *testing.T) {
	t.Parallel()
	for name, flags := range map[string]uint8{"RST": dptest.RST, "FIN": dptest.FIN | dptest.ACK} {
		fx := shared(t, hookTC, false, nil)
		established(fx)
		blind := fx.fromClient(dptest.TCP, flags)
		blind.Payload, blind.Ack = nil, 1<<30
		fx.runMany(every(1<<23, blind))
		fx.age(time.Hour, time.Hour)
		fx.wantReason(fmt.Sprintf("%s: after an hour", name), tcp(dptest.ACK)(fx), forwarded)
	}
}

// A RST does not end a flow just because its number is the last one, if that number comes from a forged packet.
func TestBlindDataDoesNotChooseTheNumberOfARST(t *testing.T) {
	t.Parallel()
	fx := shared(t, hookTC, false, nil)
	established(fx)
	data := fx.fromClient(dptest.TCP, dptest.ACK)
	data.Seq += 1 << 22 // 1 in 512 numbers is this close
	data.Ack += 1 << 22 // and 1 in 256 this close
	reset := fx.fromClient(dptest.TCP, dptest.RST)
	reset.Seq = data.Seq + uint32(len(data.Payload))
	fx.runMany([][]byte{data.Frame(), reset.Frame()})
	for _, f := range fx.confirmed().servers {
		must.True(t, f.F.State == uint8(bpf.FlowEstablished), "the flow is in state %d", f.F.State)
	}
}

// An ABORT ends an association's handshake only with the server's tag.
func TestBlindAbortEndsNoHandshake(t *testing.T) {
	t.Parallel()
	const chunkInit, chunkInitAck, chunkAbort, chunkCookieEcho = 1, 2, 6, 10
	fx := shared(t, hookTC, false, nil)
	fx.service(lb.SCTP, "b1")
	p := fx.fromClient(dptest.SCTP, 0)
	p.Type, p.Seq = chunkInit, 1000
	fx.went(p)
	ack := fx.reply(0)
	ack.Type, ack.Ack, ack.Seq = chunkInitAck, 1000, 5000
	fx.run(ack.Frame())
	p.Type, p.Ack = chunkAbort, 77
	fx.run(p.Frame())
	p.Type, p.Ack = chunkCookieEcho, 5000
	fx.wantReason("the cookie of the client", p, forwarded)
}
