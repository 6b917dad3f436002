package datapath

import (
	"encoding/binary"
	"testing"
	"time"

	"github.com/steelyard-lb/steelyard/datapath/dptest"
	"github.com/steelyard-lb/steelyard/datapath/internal/bpf"
	"github.com/steelyard-lb/steelyard/lb"
	"golang.org/x/sys/unix"
)

// A client that reuses its port for another server has the same source port there: it follows from a hash. What happens
// to the earlier flow must not concern the live one.

// reopened lets a client close a connection, the server first, and open another one from the same port, to another
// server. It returns a packet of the new connection.
func reopened(t *testing.T, fx *fixture) (ack dptest.Packet) {
	t.Helper()
	fx.service(lb.TCP, "b1")
	connect(fx)
	first := fx.last
	fx.closedBy(true)
	last := fx.fromClient(dptest.TCP, dptest.ACK)
	last.Seq, last.Ack, last.Payload = 1006, 5008, nil
	fx.run(last.Frame())
	fx.service(lb.TCP, "b2")
	syn := fx.fromClient(dptest.TCP, dptest.SYN)
	syn.Seq, syn.Payload = 900_000, nil
	fx.went(syn)
	second := fx.last
	if second.Dst == first.Dst || second.Src != first.Src {
		t.Fatalf("first %s -> %s, second %s -> %s", first.Src, first.Dst, second.Src, second.Dst)
	}
	answer := fx.reply(dptest.SYN | dptest.ACK)
	answer.Seq, answer.Ack, answer.Payload = 700_000, 900_001, nil
	fx.went(answer)
	ack = fx.fromClient(dptest.TCP, dptest.ACK)
	ack.Seq, ack.Ack, ack.Payload = 900_001, 700_001, nil
	if to := fx.went(ack); to != second.Dst.Addr() {
		t.Fatalf("ACK went to %s", to)
	}
	return ack
}

// The SYN of another client, which takes the rested source port at the first server, must not end the live connection,
// whether the closed one has expired or not.
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
			fx.clear("sy_snat_used") // programs believe the hints for a second
			fx.service(lb.TCP, "b1") // the first server is back
			fx.run(bare(fx.on(1, dptest.TCP, dptest.SYN), seq, 0).Frame())
			if r := fx.run(ack.Frame()); r.reason != forwarded || r.out.Dst.Addr() != live {
				t.Errorf("expired %t: the live connection: %s: %s, flags %#x", expired, r.did, r.reason, r.out.Flags)
			}
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
		for i := range 30 { // other clients, to any server
			syn := fx.on(i, dptest.TCP, dptest.SYN)
			syn.Payload = nil
			if r := fx.run(syn.Frame()); r.did != "sent" {
				continue
			}
			answer := fx.reply(dptest.SYN | dptest.ACK)
			fx.run(answer.Frame())
			fx.run(fx.on(i, dptest.TCP, dptest.ACK).Frame())
			if r := fx.run(ack.Frame()); r.reason != forwarded || r.out.Dst.Addr() != live {
				t.Fatalf("after %d flows of others (%d before): a packet of the live connection: %s: %s, flags %#x",
					i+1, before, r.did, r.reason, r.out.Flags)
			}
		}
	})
}

// hungAndReopened lets the client close its side of a flow, which expires, and open another one from the same port, to
// another server. It returns packets of both.
func hungAndReopened(t *testing.T, fx *fixture) (hung, ack dptest.Packet) {
	t.Helper()
	fx.service(lb.TCP, "b1")
	connect(fx)
	hung = fx.last
	fin := fx.fromClient(dptest.TCP, dptest.FIN|dptest.ACK)
	fin.Seq, fin.Ack, fin.Payload = 1005, 5001, nil
	fx.went(fin)
	fx.age(5*time.Minute, 5*time.Minute)
	fx.service(lb.TCP, "b2")
	syn := fx.fromClient(dptest.TCP, dptest.SYN)
	syn.Seq, syn.Payload = 900_000, nil
	fx.went(syn)
	if fx.last.Dst == hung.Dst || fx.last.Src != hung.Src {
		t.Fatalf("first %s -> %s, second %s -> %s", hung.Src, hung.Dst, fx.last.Src, fx.last.Dst)
	}
	answer := fx.reply(dptest.SYN | dptest.ACK)
	answer.Seq, answer.Ack, answer.Payload = 700_000, 900_001, nil
	fx.went(answer)
	ack = fx.fromClient(dptest.TCP, dptest.ACK)
	ack.Seq, ack.Ack, ack.Payload = 900_001, 700_001, nil
	fx.went(ack)
	return hung, ack
}

// The agent keeps the expired flow as long as the newer connection of the client lives.
func TestAnExpiredFlowIsRemovedBesideAnotherOne(t *testing.T) {
	t.Parallel()
	fx := shared(t, hookTC, false, onePort)
	hungAndReopened(t, fx)
	fx.collect()
	fx.collect()
	if n := len(fx.confirmed().servers); n != 1 {
		t.Errorf("%d flows; want 1: the other one expired a minute ago", n)
	}
}

// When the first server goes down, the agent resets the client's live connection with the second one.
func TestNoResetOfAnotherFlow(t *testing.T) {
	t.Parallel()
	for _, v6 := range []bool{false, true} {
		fx := newFixture(t, hookTC, v6, onePort)
		hung, ack := hungAndReopened(t, fx)
		fx.collect() // more than once while the client's connection lives
		plan := fx.service(lb.TCP, "b1", "b2")
		fx.goDown(plan, hung.Dst)
		var s int
		if err := fx.peer.Do(func() (err error) {
			s, err = unix.Socket(unix.AF_PACKET, unix.SOCK_RAW|unix.SOCK_NONBLOCK, int(0x0300)) // ETH_P_ALL
			return err
		}); err != nil {
			t.Fatal(err)
		}
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
			if n < off+20 || binary.BigEndian.Uint16(b[off:]) != 80 || b[off+13]&4 == 0 {
				continue
			}
			t.Errorf("v6 %t: a RST to port %d of the client", v6, binary.BigEndian.Uint16(b[off+2:]))
		}
		if r := fx.run(ack.Frame()); r.reason != forwarded || r.out.Dst.Addr() != fx.addr("b2") {
			t.Errorf("the live connection: %s %s", r.did, r.reason)
		}
	}
}

// Datagrams of other clients, which take the source port at the first server, do not move a live UDP flow.
func TestAnExpiredUDPFlowMovesNoOtherOne(t *testing.T) {
	t.Parallel()
	few := func(o *Options) { o.MaxFlows = 10_000; o.SNATPorts = []PortRange{{61000, 61007}} }
	eachOf(t, few, func(t *testing.T, fx *fixture) {
		fx.service(lb.UDP, "b1")
		fx.went(udp(fx))
		first := fx.last
		fx.went(fx.reply(0))
		fx.went(udp(fx))
		fx.age(4*time.Minute, 4*time.Minute) // idle, not yet collected
		fx.service(lb.UDP, "b2")
		fx.went(udp(fx))
		live := fx.last
		fx.went(fx.reply(0))
		fx.went(udp(fx))
		if live.Src != first.Src {
			t.Fatalf("%s, %s", first.Src, live.Src)
		}
		fx.service(lb.UDP, "b1") // back; b2 is drained: the live flow keeps it
		if r := fx.run(udp(fx).Frame()); r.out.Dst != live.Dst {
			t.Fatalf("before: %s", r.out.Dst)
		}
		for i := range 16 {
			fx.run(fx.on(i, dptest.UDP, 0).Frame())
			if r := fx.run(udp(fx).Frame()); r.out.Dst != live.Dst || r.out.Src != live.Src {
				t.Fatalf("after %d datagrams of others the live flow goes from %s to %s (%s); it went from %s to %s",
					i+1, r.out.Src, r.out.Dst, r.reason, live.Src, live.Dst)
			}
		}
	})
}

// The ACK that ends a connection frees its source port, including on the fast path of XDP.
func TestLastACKAfterASimultaneousClose(t *testing.T) {
	t.Parallel()
	eachOf(t, onePort, func(t *testing.T, fx *fixture) {
		fx.service(lb.TCP, "b1")
		connect(fx)
		answer := fx.reply(dptest.FIN | dptest.ACK)
		answer.Seq, answer.Ack = 5001, 1001
		fin := fx.fromClient(dptest.TCP, dptest.FIN|dptest.ACK) // has not received the answer
		fin.Payload = nil
		fx.went(answer)
		fx.went(fin)
		ack := fx.fromClient(dptest.TCP, dptest.ACK)
		ack.Seq, ack.Ack, ack.Payload = 1002, 5008, nil
		fx.went(ack)
		syn := fx.on(1, dptest.TCP, dptest.SYN)
		syn.Seq = 1 << 20
		fx.wantReason("a SYN that the server must accept", syn, forwarded)
	})
}
