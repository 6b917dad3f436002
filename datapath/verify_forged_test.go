package datapath

import (
	"errors"
	"net/netip"
	"testing"
	"time"

	"github.com/steelyard-lb/steelyard/datapath/dptest"
	"github.com/steelyard-lb/steelyard/lb"
)

// Forged packets open flows of the client of made packets, with all ports. They withdraw nothing when their server is
// removed: such flows go on, and say nothing about new ones. A fault is still found when there are many of them.
func TestForgedFlowsWithdrawNothing(t *testing.T) {
	t.Parallel()
	fx := shared(t, hookTC, false, func(o *Options) { o.MaxFlows = 300_000 })
	put := func(affinity time.Duration, servers ...string) {
		fx.serve(func(s *lb.Service) {
			s.Method, s.Encap, s.Ports[0].Target = lb.MethodTunnel, lb.EncapGUE, 80
			s.Affinity = affinity
		}, servers...)
	}
	f := lb.Frontend{VIP: fx.addr("vip"), Port: 80, Protocol: lb.TCP}
	fault := func() (fault string) {
		fx.do(func() error {
			s, ok := fx.d.services.Subject(f)
			if !ok {
				return errors.New("the frontend has no backend")
			}
			v := fx.d.verifier
			v.Mu.Lock()
			defer v.Mu.Unlock()
			v.Look(true)
			fault = v.Fault(f, s)
			return nil
		})
		return fault
	}
	put(time.Hour, "b1", "b2")
	if f := fault(); f != "" {
		t.Fatal(f)
	}
	client, ok := fx.d.verifier.Clients.Of(fx.addr("vip"), nil)
	if !ok {
		t.Fatal("no client of made packets")
	}
	forge := func(step int) netip.Addr {
		var frames [][]byte
		var p dptest.Packet
		for port := 1024; port < 65536; port += step {
			for _, flags := range []uint8{dptest.SYN, dptest.ACK} {
				p = fx.fromClient(dptest.TCP, flags)
				p.Src = netip.AddrPortFrom(client, uint16(port))
				frames = append(frames, p.Frame())
			}
		}
		fx.runMany(frames)
		return fx.went(p)
	}
	// removed forges flows of one of so many ports, and removes their server, also from what the table lists.
	removed := func(step int) (left string) {
		fx.reset()
		put(time.Hour, "b1", "b2")
		left = "b1"
		if forge(step) == fx.addr(left) {
			left = "b2"
		}
		put(time.Hour, left)
		return left
	}
	put(0, removed(1))
	if f := fault(); f != "" {
		t.Errorf("all flows of the client are forged: fault %q", f)
	}
	removed(2)
	put(0, "elsewhere")
	if f := fault(); f == "" {
		t.Error("each second flow is forged: no fault of a server without a route")
	}
}
