package datapath

import (
	"encoding/binary"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/steelyard-lb/steelyard/datapath/dptest"
	"github.com/steelyard-lb/steelyard/lb"
)

// A client that reuses its port for another server has the same source port there: it follows from a hash. What the
// agent does about the earlier flow must not concern the live one.

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
	fx := newFixture(t, hookTC, false, func(o *Options) { o.SNATPorts = []PortRange{{61000, 61000}} })
	hungAndReopened(t, fx)
	fx.collect()
	fx.collect()
	if n := len(fx.confirmed().servers); n != 1 {
		t.Errorf("%d flows; want 1: the other one expired a minute ago", n)
	}
}

// When the first server goes down, the agent resets the client's live connection with the second one.
func TestNoResetOfAnotherFlow(t *testing.T) {
	for _, v6 := range []bool{false, true} {
		fx := newFixture(t, hookTC, v6, func(o *Options) { o.SNATPorts = []PortRange{{61000, 61000}} })
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
