package datapath

import (
	"errors"
	"testing"

	"github.com/vishvananda/netlink"

	"github.com/steelyard-lb/steelyard/datapath/dptest"
	"github.com/steelyard-lb/steelyard/datapath/internal/bpf"
	"github.com/steelyard-lb/steelyard/e2e/lab"
	"github.com/steelyard-lb/steelyard/lb"
	"github.com/steelyard-lb/steelyard/lb/lbtest/must"
)

// With an MTU of 9000 XDP is attached natively, and frames of several buffers are
// forwarded and answered.
func TestJumboFrames(t *testing.T) {
	t.Parallel()
	each(t, func(t *testing.T, h hookName, v6 bool) {
		fx := newFixtureWith(t, h, v6, nil, func(fx *fixture) {
			for _, host := range []*lab.Host{fx.host, fx.peer} {
				err := host.Do(func() error {
					nic, err := netlink.LinkByName("eth0")
					return errors.Join(err, netlink.LinkSetMTU(nic, 9000))
				})
				if err != nil {
					t.Fatal(err)
				}
			}
		})
		established(fx)
		// BPF_PROG_TEST_RUN gives XDP one buffer for up to 3520 bytes, and takes up to about 3700 for tc.
		const size = 3560
		run := func(p dptest.Packet) dptest.Packet {
			frame, did := p.Frame(), "passed"
			out := frame
			if h == hookXDP {
				did, out = fx.runXDP(frame)
			}
			if did == "passed" {
				did, out = fx.runTC(out)
			}
			answer, err := dptest.Parse(out)
			if did != "sent" || err != nil {
				t.Errorf("%s: %v", did, err)
			}
			return answer
		}
		big := tcp(dptest.ACK | dptest.PSH)(fx)
		big.Payload = make([]byte, size)
		for i := range big.Payload {
			big.Payload[i] = byte(i * 7)
		}
		was := fx.bytes()
		if err := sentOn(fx, big, run(big)); err != nil {
			t.Error("forwarded with other contents or headers") // err has all of them
		}
		if got := fx.bytes() - was; got != uint64(len(big.Frame())) {
			t.Errorf("%d bytes were counted; want %d", got, len(big.Frame()))
		}
		big.Src = fx.at("client", 40001)
		if err := aReset(fx, big, run(big)); err != nil {
			t.Error(err)
		}
		ping := icmp(8, 128)(fx)
		ping.Payload = big.Payload
		if err := echoReply(fx, ping, run(ping)); err != nil {
			t.Error("the echo reply has other contents")
		}
	})
}

// Where XDP sends out of the ingress interface, frames of several buffers do not pass tc.
func TestJumboFramesByXDP(t *testing.T) {
	t.Parallel()
	for _, v6 := range []bool{false, true} {
		fx := newFixture(t, hookXDP, v6, nil)
		established(fx)
		var objects *bpf.Objects
		fx.do(func() (err error) {
			o := fx.o
			o.Interfaces = []string{"lo"} // has a large MTU and is no veth
			objects, _, err = load(o, fx.d.pins.Dir)
			return err
		})
		t.Cleanup(func() { objects.Close() })
		big := tcp(dptest.ACK | dptest.PSH)(fx)
		big.Payload = make([]byte, 8000)
		for i := range big.Payload {
			big.Payload[i] = byte(i * 7)
		}
		nic := func(mtu int) {
			fx.do(func() error {
				nic, err := netlink.LinkByName("eth0")
				return errors.Join(err, netlink.LinkSetMTU(nic, mtu))
			})
		}
		frame := big.Frame()
		nic(1500)
		did, out := fx.runProgram(objects.SyXdp, frame, fx.xdp(frame), hookXDP.verdicts())
		if did != "passed" || string(out) != string(frame) {
			t.Errorf("too big for the MTU: %s by XDP; want passed to tc, which answers", did)
		}
		nic(9000)
		did, out = fx.runProgram(objects.SyXdp, frame, fx.xdp(frame), hookXDP.verdicts())
		p, err := dptest.Parse(out)
		if did != "sent" || err != nil || sentOn(fx, big, p) != nil {
			t.Errorf("%s, %v", did, err)
		}
	}
}

// Packets of servers count as replies, on the short way through the programs, too.
func TestRepliesAreCounted(t *testing.T) {
	t.Parallel()
	eachOnce(t, func(t *testing.T, h hookName, v6 bool) {
		fx := shared(t, h, v6, nil)
		fx.reset()
		fx.service(lb.TCP, "b1")
		fx.run(fx.fromClient(dptest.TCP, dptest.SYN).Frame())
		fx.run(fx.reply(dptest.SYN | dptest.ACK).Frame())
		fx.run(fx.fromClient(dptest.TCP, dptest.ACK).Frame())
		for range 10 {
			fx.run(fx.reply(dptest.ACK).Frame())
		}
		for f, got := range must.Get(fx.d.Stats())(t).Frontends {
			if got.Packets != 13 || got.Replies != 11 || got.Flows != 1 {
				t.Errorf("%v: %+v", f, got)
			}
		}
	})
}

// bytes are those counted for the frontend.
func (fx *fixture) bytes() (n uint64) {
	fx.t.Helper()
	s, err := fx.d.Stats()
	if err != nil {
		fx.t.Fatal(err)
	}
	for _, f := range s.Frontends {
		n += f.Bytes
	}
	return n
}
