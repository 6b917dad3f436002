package datapath

import (
	"errors"
	"testing"
	"time"

	"github.com/steelyard-lb/steelyard/datapath/dptest"
	"github.com/steelyard-lb/steelyard/datapath/internal/bpf"
	"github.com/steelyard-lb/steelyard/lb"
)

// stamped is a packet with a sequence number and a timestamp.
func stamped(p dptest.Packet, seq, timestamp uint32) dptest.Packet {
	p.Seq, p.Timestamp = seq, timestamp
	return p
}

// closedBy closes the connection of the fixture: each of the two sides sends FIN, in this order.
func (fx *fixture) closedBy(server bool) {
	fx.t.Helper()
	fins := []dptest.Packet{fx.reply(dptest.FIN | dptest.ACK),
		stamped(fx.fromClient(dptest.TCP, dptest.FIN|dptest.ACK), 1005, 7000)}
	fins[0].Seq, fins[0].Ack = 5001, 1005
	fins[1].Ack = 5008
	if !server {
		fins[0], fins[1] = fins[1], fins[0]
	}
	for _, p := range fins {
		if r := fx.run(p.Frame()); r.did != "sent" {
			fx.t.Fatalf("FIN was %s: %s", r.did, r.reason)
		}
	}
}

// A source port rests while the server may have its connection in TIME_WAIT, unless the server must accept the SYN (RFC
// 6191). There is one port here.
func TestSourcePortsRest(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct {
		name           string
		serverFirst    bool
		age            time.Duration
		seq, timestamp uint32
		reason         string
	}{
		{"server first, at once", true, 0, 900, 0, "snat_exhausted"},
		{"server first, after the short rest", true, 12 * time.Second, 900, 0, "snat_exhausted"},
		{"server first, after TIME_WAIT", true, 67 * time.Second, 900, 0, "forwarded"},
		{"server first, the SYN has a later number", true, 0, 1100, 0, "forwarded"},
		{"server first, the SYN has a later timestamp", true, 0, 900, 7001, "forwarded"},
		{"server first, the SYN has the same timestamp", true, 0, 900, 7000, "snat_exhausted"},
		{"server first, an earlier timestamp and a later number", true, 0, 1100, 6999, "snat_exhausted"},
		{"client first, at once", false, 0, 1100, 7001, "snat_exhausted"},
		{"client first, after the short rest", false, 12 * time.Second, 900, 0, "forwarded"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			fx := shared(t, hookTC, false, func(o *Options) { o.SNATPorts = []PortRange{{61000, 61000}} })
			fx.service(lb.TCP, "b1")
			connect(fx)
			fx.closedBy(tt.serverFirst)
			fx.age(tt.age, tt.age)
			syn := fx.fromClient(dptest.TCP, dptest.SYN)
			syn.Src = fx.at("client", 40001)
			if r := fx.run(stamped(syn, tt.seq, tt.timestamp).Frame()); r.reason != tt.reason {
				t.Errorf("a new client: %s; want %s", r.reason, tt.reason)
			}
		})
	}
}

// Flows keep their source ports when snat_ports changes, and answers reach the client; new flows get one of the new
// ports.
func TestSNATPortsChange(t *testing.T) {
	t.Parallel()
	eachOnce(t, func(t *testing.T, h hookName, v6 bool) {
		fx := newFixture(t, h, v6, nil)
		established(fx)
		port := fx.last.Src.Port()
		fx.close()
		fx.o.SNATPorts = []PortRange{{2000, 2999}}
		fx.open()
		if r := fx.run(fx.fromClient(dptest.TCP, dptest.ACK).Frame()); r.did != "sent" || r.out.Src.Port() != port {
			t.Errorf("a packet of the flow was %s from port %d; want %d", r.did, r.out.Src.Port(), port)
		}
		if r := fx.run(fx.reply(dptest.ACK).Frame()); r.did != "sent" || r.out.Dst != fx.at("client", 40000) {
			t.Errorf("an answer was %s (%s)", r.did, r.reason)
		}
		p := fx.fromClient(dptest.TCP, dptest.SYN)
		p.Src = fx.at("client", 40001)
		if r := fx.run(p.Frame()); r.did != "sent" || r.out.Src.Port()/1000 != 2 {
			t.Errorf("a new flow was %s from port %d", r.did, r.out.Src.Port())
		}
	})
}

// What a server sends again after both sides have sent FIN goes to the client that it is for, and not to one that got
// the source port. There is one port here.
func TestUnacknowledgedDataGoesToNoOtherClient(t *testing.T) {
	t.Parallel()
	fx := shared(t, hookTC, false, func(o *Options) { o.SNATPorts = []PortRange{{61000, 61000}} })
	fx.service(lb.TCP, "b1")
	connect(fx)
	answer := fx.reply(dptest.FIN | dptest.ACK)
	answer.Seq, answer.Ack = 5001, 1001
	fin := fx.fromClient(dptest.TCP, dptest.FIN|dptest.ACK) // has not received the answer
	fin.Payload = nil
	for _, p := range []dptest.Packet{answer, fin} {
		if r := fx.run(p.Frame()); r.did != "sent" {
			t.Fatalf("FIN was %s: %s", r.did, r.reason)
		}
	}
	syn := fx.on(1, dptest.TCP, dptest.SYN)
	syn.Seq = 1 << 20
	fx.run(syn.Frame())
	if r := fx.run(answer.Frame()); r.out.Dst != fx.fromClient(dptest.TCP, 0).Src {
		t.Errorf("the answer, sent again, went to %s", r.out.Dst)
	}
}

// The source port of a connection whose client had all does not rest longer because that client has a newer connection
// from the same port by now, whose entry has replaced that of the older one. There is one port here.
func TestSourcePortOfAClientThatCameBack(t *testing.T) {
	t.Parallel()
	fx := shared(t, hookTC, false, func(o *Options) { o.SNATPorts = []PortRange{{61000, 61000}} })
	fx.service(lb.TCP, "b1")
	connect(fx)
	fx.closedBy(true)
	var k bpf.ClientKey
	clients := fx.d.objects.SyStreamClients
	if err := errors.Join(clients.NextKey(nil, &k), clients.Delete(&k)); err != nil {
		t.Fatal(err)
	}
	syn := stamped(fx.on(1, dptest.TCP, dptest.SYN), 1100, 7001)
	if r := fx.run(syn.Frame()); r.reason != forwarded {
		t.Errorf("the SYN of another client: %s", r.reason)
	}
}
