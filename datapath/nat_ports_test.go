package datapath

import (
	"testing"

	"github.com/steelyard-lb/steelyard/datapath/dptest"
	"github.com/steelyard-lb/steelyard/lb"
)

// A client whose first choices of a source port are all in use gets another one, for the SYN or for its repetition: the
// last free port is found, too. The handshake goes on with it.
func TestEverySourcePortIsUsed(t *testing.T) {
	t.Parallel()
	const ports = 20
	few := func(o *Options) { o.SNATPorts = []PortRange{{61000, 61000 + ports - 1}} }
	eachOf(t, few, func(t *testing.T, fx *fixture) {
		fx.service(lb.TCP, "b1")
		for flow := range ports {
			r := fx.run(fx.on(flow, dptest.TCP, dptest.SYN).Frame())
			for repeated := 0; r.did != "sent" && repeated < 500; repeated++ {
				r = fx.run(fx.on(flow, dptest.TCP, dptest.SYN).Frame())
			}
			if r.did != "sent" {
				t.Fatalf("flow %d of %d: the SYN is %s: %s", flow, ports, r.did, r.reason)
			}
			fx.last = r.out
			again := fx.run(fx.on(flow, dptest.TCP, dptest.SYN).Frame())
			if again.did != "sent" || again.out.Src != r.out.Src {
				t.Fatalf("flow %d: the SYN again is %s from %s, after %s", flow, again.did, again.out.Src, r.out.Src)
			}
			ack := fx.on(flow, dptest.TCP, dptest.ACK)
			if back := fx.run(fx.reply(dptest.SYN | dptest.ACK).Frame()); back.out.Dst != ack.Src {
				t.Fatalf("flow %d: the SYN-ACK is %s to %s", flow, back.did, back.out.Dst)
			}
			if got := fx.run(ack.Frame()); got.reason != forwarded || got.out.Src != r.out.Src {
				t.Fatalf("flow %d: the ACK is %s from %s; want %s", flow, got.reason, got.out.Src, r.out.Src)
			}
		}
	})
}
