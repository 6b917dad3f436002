package datapath

import (
	"net/netip"
	"testing"

	"github.com/steelyard-lb/steelyard/datapath/dptest"
	"github.com/steelyard-lb/steelyard/lb"
)

// insideMark is INSIDE_MARK of bpf/act_tc.h.
const insideMark = 0x535a0001

// spread puts VIP:80 to pods on these machines: "box" is this one, whose pod is b1; others have one by the name of "far".
func (w *world) spread(nodes ...string) {
	w.t.Helper()
	s := &lb.Service{
		Name: "web", VIPs: []netip.Addr{w.addr("vip")}, Ports: []lb.Port{{Port: 80, Target: 80, Protocol: lb.TCP}},
		Algorithm: lb.AlgorithmMaglev, Method: lb.MethodNAT, Spread: true, Check: lb.CheckSpec{Type: lb.CheckNone}, PerPort: [][]lb.Backend{nil},
	}
	for _, n := range nodes {
		b := lb.Backend{Addr: w.addr("far"), Port: 8080, Weight: 1, Node: w.addr(n)}
		if n == "box" {
			b.Addr, b.Here = w.addr("b1"), true
		}
		s.PerPort[0] = append(s.PerPort[0], b)
	}
	w.apply(lb.Delta{Put: lb.Build(s, nil).Frontends})
}

// deliversTo opens flows until one is delivered here, or sent to another machine, and returns it.
func (w *world) deliversTo(here bool, from int) dptest.Packet {
	w.t.Helper()
	for i := from; i < from+50; i++ {
		p := w.on(i, dptest.TCP, dptest.SYN)
		if r := w.run(p.Frame()); (r.did == "passed") == here {
			return p
		}
	}
	w.t.Fatalf("no flow of 50 is delivered here: %t", here)
	return dptest.Packet{}
}

// A machine of many delivers what it has chosen itself for, and sends the rest to others, untouched.
func TestSpread(t *testing.T) {
	each(t, func(t *testing.T, h hook, v6 bool) {
		w := newWorld(t, h, v6, func(o *Options) { o.Delivers = true })
		w.spread("box", "b2")
		local, remote := w.deliversTo(true, 0), w.deliversTo(false, 0)
		if r := w.run(local.Frame()); r.did != "passed" || r.out.Dst != w.at("b1", 8080) || r.out.Src != local.Src {
			t.Errorf("a flow of this machine: %s: %s: %+v", r.did, r.reason, r.out)
		}
		r := w.run(remote.Frame())
		if r.did != "sent" || r.out.Dst.Addr() != w.addr("b2") {
			t.Fatalf("a flow of another machine: %s: %s: %+v", r.did, r.reason, r.out)
		}
		if err := tunnelled(dptest.UDP)(w, remote, r.out); err != nil {
			t.Error(err)
		}
		// A SYN that was not answered goes where the table of now says.
		w.spread("box")
		if r := w.run(remote.Frame()); r.did != "passed" {
			t.Errorf("a SYN again, alone: %s: %s", r.did, r.reason)
		}
		w.reset()
		w.spread("box", "b2")
		w.run(local.Frame())
		w.run(remote.Frame())
		// Both go on when their slots change hands.
		w.out(dptest.Packet{Src: w.at("b1", 8080), Dst: local.Src, Proto: dptest.TCP, Flags: dptest.SYN | dptest.ACK, Seq: 5000})
		goes := func(p dptest.Packet, did, when string) {
			t.Helper()
			p.Flags = dptest.ACK
			if r := w.run(p.Frame()); r.did != did {
				t.Errorf("%s: %s: %s; want %s", when, r.did, r.reason, did)
			}
		}
		goes(local, "passed", "proved")
		goes(remote, "sent", "proved")
		w.spread("b2")
		goes(local, "passed", "without an endpoint here")
		w.spread("box")
		goes(local, "passed", "alone")
		goes(remote, "sent", "alone")
	})
}

// What another machine sends here comes by once more without its tunnel, and is delivered; nobody else's is.
func TestDeliversFromTunnels(t *testing.T) {
	for _, v6 := range []bool{false, true} {
		w := newWorld(t, hookTC, v6, func(o *Options) { o.Delivers = true })
		w.spread("box", "b2")
		w.do(func() error { return w.d.SetTunnelSources([]netip.Addr{w.addr("b2")}) })
		inner := w.fromClient(dptest.TCP, dptest.SYN)
		tunnel := func(from string) dptest.Packet {
			return dptest.Packet{Src: w.at(from, 50000), Dst: w.at("box", 6090), Proto: dptest.UDP, Payload: dptest.GUE(inner)}
		}
		did, frame := w.runTC(tunnel("b2").Frame())
		out, err := dptest.Parse(frame)
		if did != "sent" || err != nil || out.Src != inner.Src || out.Dst != inner.Dst {
			t.Fatalf("out of its tunnel: %s, %v: %+v", did, err, out)
		}
		inside := func() (string, dptest.Packet) {
			did, frame := w.runProgram(w.d.objects.SyTcIn, inner.Frame(), w.skb(insideMark), hookTC.verdicts())
			out, err := dptest.Parse(frame)
			if err != nil {
				t.Fatal(err)
			}
			return did, out
		}
		if did, out := inside(); did != "passed" || out.Dst != w.at("b1", 8080) || out.Src != inner.Src {
			t.Errorf("delivered: %s: %+v", did, out)
		}
		if did, _ := w.runTC(tunnel("router").Frame()); did != "dropped" {
			t.Errorf("a tunnel of a stranger: %s", did)
		}
		w.reset()
		w.spread("b2")
		if did, _ := inside(); did != "dropped" {
			t.Errorf("without an endpoint here: %s", did)
		}
	}
}
