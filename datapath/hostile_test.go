package datapath

import (
	"context"
	"maps"
	"net"
	"net/netip"
	"testing"
	"time"

	"github.com/vishvananda/netlink"

	"github.com/steelyard-lb/steelyard/datapath/dptest"
	"github.com/steelyard-lb/steelyard/e2e/lab/labtest"
)

// Frames for other machines, which a switch floods or a promiscuous interface receives, are left alone, and so are
// unicast packets in multicast frames. The address is that of the uplink, also after a change.
func TestFramesForOthersAreLeftAlone(t *testing.T) {
	t.Parallel()
	each(t, func(t *testing.T, h hookName, v6 bool) {
		fx := newFixture(t, h, v6, nil)
		web(fx)
		other := net.HardwareAddr{2, 0, 0, 0, 0, 0x77}
		did := func(to net.HardwareAddr, p dptest.Packet) string {
			p.To = to
			frame := p.Frame()
			before := fx.counts()
			did, out := "passed", frame
			if h == hookXDP {
				did, out = fx.runXDP(frame)
			}
			if did == "passed" {
				did, out = fx.runTC(frame)
			}
			if did == "passed" && string(out) != string(frame) {
				t.Errorf("to %s: passed on changed", to)
			}
			if did == "passed" && !maps.Equal(fx.counts(), before) {
				t.Errorf("to %s: counted", to)
			}
			return did
		}
		for _, to := range []net.HardwareAddr{
			other, {0xff, 0xff, 0xff, 0xff, 0xff, 0xff}, {1, 0, 0x5e, 0, 0, 1}, {2, 0, 0, 0, 0, 0}, {0, 0, 0, 0, 0, 1},
		} {
			for _, p := range []dptest.Packet{
				tcp(dptest.SYN)(fx), tcp(dptest.ACK)(fx), toPort(81)(fx), icmp(8, 128)(fx),
			} {
				if got := did(to, p); got != "passed" {
					t.Errorf("to %s: a packet of protocol %d was %s", to, p.Proto, got)
				}
			}
		}
		if err := fx.flows().want(0, 0); err != nil {
			t.Error(err)
		}
		if got := did(dptest.MAC, tcp(dptest.SYN)(fx)); got != "sent" {
			t.Errorf("to the uplink: %s", got)
		}
		fx.watch()
		fx.do(func() error {
			nic, err := netlink.LinkByName("eth0")
			if err != nil {
				return err
			}
			return netlink.LinkSetHardwareAddr(nic, other)
		})
		labtest.Until(t, 10*time.Second, "the new address is known", func() error {
			p := icmp(8, 128)(fx) // a change of the address removes all neighbours
			p.To = other
			run := fx.runXDP
			if h == hookTC {
				run = fx.runTC
			}
			got, _ := run(p.Frame())
			return wrong(got != "sent", "%s", got)
		})
		if got := did(dptest.MAC, tcp(dptest.SYN)(fx)); got != "passed" {
			t.Errorf("to the earlier address: %s", got)
		}
	})
}

// Refused packets do not use up the allowance of packet-too-big errors.
func TestRefusalsDoNotSilencePacketTooBig(t *testing.T) {
	t.Parallel()
	eachOf(t, nil, func(t *testing.T, fx *fixture) {
		gue(fx)
		refused := udp(fx)
		run := fx.runTC
		if fx.hook == hookXDP {
			run = fx.runXDP
		}
		for range 3000 {
			run(refused.Frame())
		}
		big := tcp(dptest.ACK)(fx)
		big.Payload = make([]byte, 1440)
		if did, _ := run(big.Frame()); did != "sent" {
			t.Errorf("packet too big was not answered: %s", did)
		}
	})
}

// watch follows the kernel's interfaces and addresses until the test ends.
func (fx *fixture) watch() {
	ctx, stop := context.WithCancel(fx.t.Context())
	done := make(chan error, 1)
	go func() { done <- fx.host.Do(func() error { return fx.d.verifier.Run(ctx) }) }()
	fx.t.Cleanup(func() {
		stop()
		if err := <-done; err != nil {
			fx.t.Error(err)
		}
	})
}

// An IPv6 frame to ::ffff:a.b.c.d is not for the IPv4 service there.
func TestMappedDestination(t *testing.T) {
	t.Parallel()
	for _, h := range []hookName{hookXDP, hookTC} {
		fx := shared(t, h, false, nil)
		web(fx)
		p := tcp(dptest.SYN)(fx)
		p.Src = netip.MustParseAddrPort("[2001:db8::100]:40000")
		p.Dst = netip.AddrPortFrom(netip.AddrFrom16(p.Dst.Addr().As16()), p.Dst.Port())
		if r := fx.run(p.Frame()); r.did != "dropped" || r.reason != "malformed" {
			t.Errorf("%s: %s: %s", h, r.did, r.reason)
		}
	}
}

// A packet with IP options that is refused is no internal error.
func TestRefusedPacketWithOptions(t *testing.T) {
	t.Parallel()
	each(t, func(t *testing.T, h hookName, v6 bool) {
		fx := newFixture(t, h, v6, nil)
		web(fx)
		before := fx.counts()
		p := udp(fx)
		p.Options = true
		fx.run(p.Frame())
		fx.shrinkMTU(1280)
		p = fx.fromClient(dptest.TCP, dptest.SYN)
		p.Options, p.Payload = true, make([]byte, 1300)
		fx.run(p.Frame())
		internal := Verdict{"drop", "internal_error"}
		if n := fx.counts()[internal] - before[internal]; n > 0 {
			t.Errorf("%d packets count as internal errors", n)
		}
	})
}

// Nobody has a broadcast or multicast address: an answer would go to all hosts of a link.
func TestBroadcastSourcesGetNoAnswer(t *testing.T) {
	t.Parallel()
	for _, h := range []hookName{hookXDP, hookTC} {
		fx := shared(t, h, false, nil)
		web(fx)
		for source, want := range map[string]string{
			"192.0.2.254": "echo_reply", "192.0.2.255": "source_is_local", "255.255.255.255": "malformed",
			"239.1.1.1": "malformed",
		} {
			ping := icmp(8, 128)(fx)
			ping.Src = netip.AddrPortFrom(netip.MustParseAddr(source), 0)
			if r := fx.run(ping.Frame()); r.reason != want || (r.did == "dropped") != (want != "echo_reply") {
				t.Errorf("%s: a ping from %s was %s: %s; want %s", h, source, r.did, r.reason, want)
			}
		}
		syn := tcp(dptest.SYN)(fx)
		syn.Src = netip.MustParseAddrPort("192.0.2.255:40000")
		if r := fx.run(syn.Frame()); r.reason != "source_is_local" {
			t.Errorf("%s: a SYN from a broadcast address was %s: %s", h, r.did, r.reason)
		}
		if err := fx.flows().want(0, 0); err != nil {
			t.Errorf("%s: %v", h, err)
		}
	}
}
