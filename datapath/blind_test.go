package datapath

import (
	"testing"
	"time"

	"github.com/steelyard-lb/steelyard/datapath/dptest"
	"github.com/steelyard-lb/steelyard/datapath/internal/bpf"
	"github.com/steelyard-lb/steelyard/lb"
)

// every returns frames with sequence numbers at this distance, so that one of them is near any number.
func every(distance uint32, p dptest.Packet) (frames [][]byte) {
	for seq := uint64(0); seq < 1<<32; seq += uint64(distance) {
		p.Seq = uint32(seq) + 1<<20
		frames = append(frames, p.Frame())
	}
	return frames
}

// Who knows the addresses and ports of an idle connection, but no numbers, does not end it by a few hundred packets.
// Their numbers are not in the window of the receiver, which says nothing.
func TestBlindPacketsEndNoIdleConnection(t *testing.T) {
	t.Parallel()
	for name, flags := range map[string]uint8{"RST": dptest.RST, "FIN": dptest.FIN | dptest.ACK} {
		fx := shared(t, hookTC, false, nil)
		established(fx)
		blind := fx.fromClient(dptest.TCP, flags)
		blind.Payload, blind.Ack = nil, 1<<30
		fx.runMany(every(1<<23, blind))
		fx.age(time.Hour, time.Hour)
		if r := fx.run(tcp(dptest.ACK)(fx).Frame()); r.reason != "forwarded" {
			t.Errorf("%s: after an hour: %s: %s", name, r.did, r.reason)
		}
	}
}

// A RST ends no flow by a number that an invented packet has made the last one.
func TestBlindDataDoesNotChooseTheNumberOfARST(t *testing.T) {
	t.Parallel()
	fx := shared(t, hookTC, false, nil)
	established(fx)
	data := fx.fromClient(dptest.TCP, dptest.ACK)
	data.Seq += 1 << 22 // one of 512 has such a number
	data.Ack += 1 << 22 // and one of 256 that
	reset := fx.fromClient(dptest.TCP, dptest.RST)
	reset.Seq = data.Seq + uint32(len(data.Payload))
	fx.runMany([][]byte{data.Frame(), reset.Frame()})
	for _, f := range fx.confirmed().servers {
		if f.F.State != uint8(bpf.FlowEstablished) {
			t.Errorf("the flow is in state %d", f.F.State)
		}
	}
}

// A forged SYN and a RST that follows it do not end a handshake.
func TestBlindPacketsEndNoHandshake(t *testing.T) {
	t.Parallel()
	fx := shared(t, hookTC, false, nil)
	with(web, tcp(dptest.SYN), replies(dptest.SYN|dptest.ACK))(fx)
	forged := fx.fromClient(dptest.TCP, dptest.SYN)
	forged.Seq, forged.Payload = 1<<30, nil
	reset := fx.fromClient(dptest.TCP, dptest.RST)
	reset.Seq, reset.Payload = 1<<30+1, nil
	fx.runMany([][]byte{forged.Frame(), reset.Frame()})
	if r := fx.run(tcp(dptest.ACK)(fx).Frame()); r.reason != "forwarded" {
		t.Errorf("the ACK of the client: %s", r.reason)
	}
}

// An ABORT ends the handshake of an association only with the tag of the server.
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
	if r := fx.run(p.Frame()); r.reason != "forwarded" {
		t.Errorf("the cookie of the client: %s", r.reason)
	}
}
