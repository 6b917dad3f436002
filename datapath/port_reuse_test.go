package datapath

import (
	"encoding/binary"
	"testing"
	"time"

	"github.com/steelyard-lb/steelyard/datapath/dptest"
	"github.com/steelyard-lb/steelyard/datapath/internal/bpf"
	"github.com/steelyard-lb/steelyard/lb"
	"github.com/steelyard-lb/steelyard/lb/lbtest/must"
	"golang.org/x/sys/unix"
)

// A client that reuses its port with another server has the same source port there, because the hash determines it.
// Events of the previous flow must not affect the live one.

// reopened lets a client close a connection, the server first, and open another one from the same port to another
// server. It returns a packet of the new connection.
func reopened(t *testing.T, fx *fixture) (ack dptest.Packet) {
	t.Helper()
	fx.service(lb.TCP, "b1")
	connect(fx)
	first := fx.last
	fx.closedBy(true)
	fx.run(bare(fx.fromClient(dptest.TCP, dptest.ACK), 1006, 5008).Frame())
	return opensAgain(t, fx, first)
}

// opensAgain lets a client open another connection from the same port to b2, and returns a packet of it.
func opensAgain(t *testing.T, fx *fixture, first dptest.Packet) (ack dptest.Packet) {
	t.Helper()
	fx.service(lb.TCP, "b2")
	fx.went(bare(fx.fromClient(dptest.TCP, dptest.SYN), 900_000, 0))
	second := fx.last
	must.Need(t, second.Dst != first.Dst && second.Src == first.Src,
		"first %s -> %s, second %s -> %s", first.Src, first.Dst, second.Src, second.Dst)
	fx.went(bare(fx.reply(dptest.SYN|dptest.ACK), 700_000, 900_001))
	ack = bare(fx.fromClient(dptest.TCP, dptest.ACK), 900_001, 700_001)
	must.Equal(t, second.Dst.Addr(), fx.went(ack))
	return ack
}

// Another client's SYN, which takes the rested source port at the first server, must not end the live connection,
// whether or not the closed one has expired.
func TestAClaimedPortEndsNoOtherFlow(t *testing.T) {
	t.Parallel()
	eachOf(t, onePort, func(t *testing.T, fx *fixture) {
		for expired, seq := range map[bool]uint32{false: 1 << 20, true: 1} {
			fx.reset()
			ack := reopened(t, fx)
			live := fx.last.Dst.Addr()
			if expired {
				fx.closedHaveRested()
			}
			fx.clear("sy_snat_used") // programs rely on hints for a second
			fx.service(lb.TCP, "b1") // the first server is back
			fx.run(bare(fx.on(1, dptest.TCP, dptest.SYN), seq, 0).Frame())
			r := fx.run(ack.Frame())
			must.True(t, r.reason == forwarded && r.out.Dst.Addr() == live,
				"expired %t: the live connection: %s: %s, flags %#x", expired, r.did, r.reason, r.out.Flags)
		}
	})
}

// closedHaveRested makes closed flows old enough to be removed.
func (fx *fixture) closedHaveRested() {
	fx.t.Helper()
	for k, f := range fx.confirmed().servers {
		if f.F.State == uint8(bpf.FlowClosed) {
			f.F.Seen -= bpf.FlowClock(70 * time.Second)
			fx.put(fx.d.objects.SyStreamServers, k, f)
		}
	}
}

// Without an agent, a packet that stores a flow removes expired ones.
func TestReclaimEndsNoOtherFlow(t *testing.T) {
	t.Parallel()
	eachOf(t, func(o *Options) { o.MaxFlows = 10 }, func(t *testing.T, fx *fixture) {
		fx.agentGone()
		ack := reopened(t, fx)
		live := fx.last.Dst.Addr()
		fx.closedHaveRested()
		before := len(fx.confirmed().servers)
		for i := range 30 { // other clients, with any server
			syn := fx.on(i, dptest.TCP, dptest.SYN)
			syn.Payload = nil
			if r := fx.run(syn.Frame()); r.did != "sent" {
				continue
			}
			answer := fx.reply(dptest.SYN | dptest.ACK)
			fx.run(answer.Frame())
			fx.run(fx.on(i, dptest.TCP, dptest.ACK).Frame())
			r := fx.run(ack.Frame())
			must.Need(t, r.reason == forwarded && r.out.Dst.Addr() == live,
				"after %d flows of others (%d before): a packet of the live connection: %s: %s, flags %#x",
				i+1, before, r.did, r.reason, r.out.Flags)
		}
	})
}

// hungAndReopened lets the client close its side of a flow, which expires, and open another one from the same port to
// another server. It returns packets of both.
func hungAndReopened(t *testing.T, fx *fixture) (hung, ack dptest.Packet) {
	t.Helper()
	fx.service(lb.TCP, "b1")
	connect(fx)
	hung = fx.last
	fx.went(bare(fx.fromClient(dptest.TCP, dptest.FIN|dptest.ACK), 1005, 5001))
	fx.age(5*time.Minute, 5*time.Minute)
	return hung, opensAgain(t, fx, hung)
}

// The agent keeps the expired flow as long as the client's newer connection lives.
func TestAnExpiredFlowIsRemovedBesideAnotherOne(t *testing.T) {
	t.Parallel()
	fx := shared(t, hookTC, false, onePort)
	hungAndReopened(t, fx)
	fx.collect()
	fx.collect()
	must.Row(t, "flows", 1, len(fx.confirmed().servers)) // the other one expired a minute ago
}

// When the first server goes down, the agent resets the client's live connection with the second one.
func TestNoResetOfAnotherFlow(t *testing.T) {
	t.Parallel()
	for _, v6 := range []bool{false, true} {
		fx := newFixture(t, hookTC, v6, onePort)
		hung, ack := hungAndReopened(t, fx)
		fx.collect() // several times while the client's connection lives
		plan := fx.service(lb.TCP, "b1", "b2")
		fx.goDown(plan, hung.Dst)
		var s int
		must.Do(t, fx.peer.Do(func() (err error) {
			s, err = unix.Socket(unix.AF_PACKET, unix.SOCK_RAW|unix.SOCK_NONBLOCK, int(0x0300)) // ETH_P_ALL
			return err
		}))
		defer unix.Close(s)
		fx.end()
		time.Sleep(200 * time.Millisecond)
		for {
			b := make([]byte, 2000)
			n, _, err := unix.Recvfrom(s, b, 0)
			if err != nil {
				break
			}
			off := 34
			if v6 {
				off = 54
			}
			isReset := n >= off+20 && binary.BigEndian.Uint16(b[off:]) == 80 && b[off+13]&4 != 0
			must.True(t, !isReset, "v6 %t: a RST to port %d of the client", v6, binary.BigEndian.Uint16(b[off+2:]))
		}
		must.Row(t, "the live connection", fx.addr("b2"), fx.went(ack))
	}
}

// Other clients that take the source port of a client's expired flow do not move the client's live UDP flow.
func TestAnExpiredUDPFlowMovesNoOtherOne(t *testing.T) {
	t.Parallel()
	few := func(o *Options) { o.MaxFlows = 10_000; o.SNATPorts = []PortRange{{61000, 61007}} }
	eachOf(t, few, func(t *testing.T, fx *fixture) {
		fx.service(lb.UDP, "b1")
		fx.went(udp(fx))
		first := fx.last
		fx.went(fx.reply(0))
		fx.went(udp(fx))
		fx.age(4*time.Minute, 4*time.Minute) // idle, but not yet collected
		fx.service(lb.UDP, "b2")
		fx.went(udp(fx))
		live := fx.last
		fx.went(fx.reply(0))
		fx.went(udp(fx))
		must.Equal(t, first.Src, live.Src)
		fx.service(lb.UDP, "b1") // b1 is back and b2 drains, but the live flow keeps b2
		must.Equal(t, live.Dst, fx.run(udp(fx).Frame()).out.Dst)
		for i := range 16 {
			fx.run(fx.on(i, dptest.UDP, 0).Frame())
			r := fx.run(udp(fx).Frame())
			must.Need(t, r.out.Dst == live.Dst && r.out.Src == live.Src,
				"after %d datagrams of others the live flow goes from %s to %s (%s); it went from %s to %s",
				i+1, r.out.Src, r.out.Dst, r.reason, live.Src, live.Dst)
		}
	})
}

// The ACK that ends a connection frees its source port, even on XDP's fast path. Until then, data that the server sends
// again goes to its client, not to a client that claims the port.
func TestLastACKAfterASimultaneousClose(t *testing.T) {
	t.Parallel()
	eachOf(t, onePort, func(t *testing.T, fx *fixture) {
		fx.service(lb.TCP, "b1")
		connect(fx)
		answer := fx.reply(dptest.FIN | dptest.ACK)
		answer.Seq, answer.Ack = 5001, 1001
		fin := fx.fromClient(dptest.TCP, dptest.FIN|dptest.ACK) // sent before the answer arrived
		fin.Payload = nil
		fx.went(answer)
		fx.went(fin)
		syn := fx.on(1, dptest.TCP, dptest.SYN)
		syn.Seq = 1 << 20
		fx.run(syn.Frame())
		must.Row(t, "the answer, sent again, went to", fin.Src, fx.run(answer.Frame()).out.Dst)
		fx.went(bare(fx.fromClient(dptest.TCP, dptest.ACK), 1002, 5008))
		fx.wantReason("a SYN that the server must accept", syn, forwarded)
	})
}
