package datapath

import (
	"testing"

	"github.com/steelyard-lb/steelyard/datapath/dptest"
	"github.com/steelyard-lb/steelyard/datapath/internal/bpf"
	"github.com/steelyard-lb/steelyard/lb"
)

// A server that sends SYN cookies answers each SYN with another number. Forged SYNs, before the client's and after it,
// do not keep the client's ACK from its server, and a RST with the number of a forged one does not end the handshake.
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
					if r := fx.run(in.Frame()); r.reason != forwarded {
						t.Fatalf("%s: %s", h, r.reason)
					}
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
			if r := fx.run(bare(fx.fromClient(dptest.TCP, dptest.ACK), 1001, 1<<31).Frame()); r.reason != "bad_ack" {
				t.Errorf("%s: %+v: a number of nobody: %s", h, x, r.reason)
			}
			if r := fx.run(bare(fx.fromClient(dptest.TCP, dptest.ACK), 1001, 5001).Frame()); r.reason != forwarded {
				t.Errorf("%s: %+v: the ACK of the client: %s", h, x, r.reason)
			}
			if err := fx.confirmed().want(1, 1); err != nil {
				t.Errorf("%s: %+v: %v", h, x, err)
			}
		}
	}
}

// A client that finds the table of flows full is reset. Its reset of the SYN-ACK that the server repeats, which knows
// nothing of that, ends the connection there. Later connections find room that has become free.
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
			if r.did != "sent" || r.reason != "flows_full" {
				t.Fatalf("the ACK: %s: %s", r.did, r.reason)
			}
			if err := aReset(fx, ack, r.out); err != nil {
				t.Error(err)
			}
		}
		fx.went(answer)
		if to := fx.went(bare(fx.fromClient(dptest.TCP, dptest.RST), 1001, 0)); to != fx.addr("b1") {
			t.Errorf("the reset went to %s", to)
		}
		for _, f := range fx.flowsIn(fx.d.objects.FlowTables()[0]).servers {
			if f.F.State != uint8(bpf.FlowClosed) {
				t.Errorf("the half-open flow is in state %d", f.F.State)
			}
		}
		fx.clear("sy_stream_servers")
		if why := fx.openFlow(lb.TCP, 1); why != "" {
			t.Errorf("a connection when there is room: %s", why)
		}
	})
}

// SCTP servers answer each INIT with another tag. The association goes on with the tags of its client, and its ABORT
// ends the flow.
func TestForgedINITs(t *testing.T) {
	t.Parallel()
	const chunkInit, chunkInitAck, chunkAbort, chunkCookieEcho, chunkCookieAck = 1, 2, 6, 10, 11
	for name, forgedFirst := range map[string]bool{"before": true, "after": false} {
		fx := shared(t, hookTC, false, nil)
		fx.service(lb.SCTP, "b1")
		send := func(p dptest.Packet, kind uint8, seq, tag uint32) {
			t.Helper()
			p.Type, p.Seq, p.Ack = kind, seq, tag
			if r := fx.run(p.Frame()); r.reason != forwarded {
				t.Errorf("%s: chunk %d with the tag %d: %s", name, kind, tag, r.reason)
			}
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
			if f.F.State != uint8(bpf.FlowClosed) {
				t.Errorf("%s: after an ABORT the flow is in state %d", name, f.F.State)
			}
		}
		if err := fx.confirmed().want(1, 1); err != nil {
			t.Errorf("%s: %v", name, err)
		}
	}
}
