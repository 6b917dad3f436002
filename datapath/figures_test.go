package datapath

import (
	"math"
	"testing"
	"time"

	"github.com/steelyard-lb/steelyard/datapath/dptest"
	"github.com/steelyard-lb/steelyard/datapath/internal/bpf"
	"github.com/steelyard-lb/steelyard/lb"
	"github.com/steelyard-lb/steelyard/lb/lbtest/must"
)

// onlyFlow returns the only flow, without its age, which must be below a minute.
func (fx *fixture) onlyFlow() lb.FlowStatus {
	fx.t.Helper()
	flows, _, err := fx.d.Flows(fx.t.Context(), lb.FlowFilter{})
	must.Need(fx.t, err == nil && len(flows) == 1 && flows[0].Age < 60, "%v: %+v; want one young flow", err, flows)
	return flows[0]
}

// A flow's packets, bytes and retransmissions are those that its sides have sent, even when the numbers wrap. The time
// of its handshake is the flow's and the backend's.
func TestFiguresOfAStream(t *testing.T) {
	t.Parallel()
	each(t, func(t *testing.T, h hookName, v6 bool) {
		fx := shared(t, h, v6, nil)
		fx.reset()
		fx.service(lb.TCP, "b1")
		seq, ack := uint32(math.MaxUint32-500), uint32(math.MaxUint32-1000)
		syn := fx.fromClient(dptest.TCP, dptest.SYN)
		syn.Payload, syn.Seq, syn.Ack = nil, seq, 0
		fx.run(syn.Frame())
		fx.run(syn.Frame()) // again
		f := fx.onlyFlow()
		must.Row(t, "before the answer", lb.FlowFigures{Packets: 2, Retransmissions: 1}, f.FromClient)
		must.Row(t, "before the answer, from the server", lb.FlowFigures{}, f.FromServer)
		must.Row(t, "no handshake yet", 0, f.Handshake)
		wait := 5 * time.Millisecond // takes longer than the histogram's first ranges
		time.Sleep(wait)
		seq++
		answer := fx.reply(dptest.SYN | dptest.ACK)
		answer.Payload, answer.Seq, answer.Ack = nil, ack, seq
		fx.run(answer.Frame())
		fx.run(answer.Frame())
		ack++
		fromClient := func(flags uint8, bytes int) {
			p := fx.fromClient(dptest.TCP, flags)
			p.Payload, p.Seq, p.Ack = make([]byte, bytes), seq, ack
			must.Row(t, "reason", "forwarded", fx.run(p.Frame()).reason)
			seq += uint32(bytes)
		}
		server := fx.last
		fromServer := func(flags uint8, bytes int) {
			p := answer
			p.Flags, p.Payload, p.Seq, p.Ack = flags, make([]byte, bytes), ack, seq
			must.Row(t, "reason", "forwarded", fx.run(p.Frame()).reason)
			ack += uint32(bytes)
		}
		fromClient(dptest.ACK, 0)
		must.Row(t, "the server", fx.addr("b1"), server.Dst.Addr())
		for range 10 {
			fromClient(dptest.ACK, 100)
		}
		for range 300 {
			fromClient(dptest.ACK|dptest.PSH, 1)
		}
		seq-- // the last one again
		fromClient(dptest.ACK, 1)
		for range 3 {
			fromServer(dptest.ACK, 1000)
		}
		fromServer(dptest.ACK, 0) // an acknowledgement is no retransmission
		f = fx.onlyFlow()
		client := lb.FlowFigures{Packets: 2 + 1 + 10 + 300 + 1, Bytes: 1000 + 300, Retransmissions: 1 + 1}
		must.Row(t, "from the client", client, f.FromClient)
		must.Row(t, "from the server", lb.FlowFigures{Packets: 2 + 4, Bytes: 3000, Retransmissions: 1}, f.FromServer)
		must.True(t, f.Handshake >= wait.Seconds() && f.Handshake < 60, "the handshake took %f s", f.Handshake)
		fromClient(dptest.ACK|dptest.FIN, 0)
		client.Packets++
		must.Row(t, "with a FIN", client, fx.onlyFlow().FromClient)

		all := must.Get(fx.d.Handshakes())(t)
		times := all[fx.at("b1", 8080)]
		p95 := times.Quantile(0.95)
		must.True(t, times.Total() == 1 && math.Abs(times.Sum-f.Handshake) < 1e-9 &&
			p95 > f.Handshake/2 && p95 < 2*f.Handshake,
			"%+v, p95 %f s; want one handshake of %f s", times, p95, f.Handshake)
	})
}

// A flow's age is right beyond the range of the flow clock.
func TestAgeOfAnOldFlow(t *testing.T) {
	t.Parallel()
	fx := shared(t, hookXDP, false, nil)
	established(fx)
	old := 300 * 24 * time.Hour
	for k, s := range fx.flows().servers {
		s.Figures.Opened -= bpf.AgeClock(old)
		fx.put(fx.d.objects.SyStreamServers, k, s)
	}
	flows, _, err := fx.d.Flows(t.Context(), lb.FlowFilter{})
	must.Need(t, err == nil && len(flows) == 1, "%v: %+v", err, flows)
	must.True(t, math.Abs(flows[0].Age-old.Seconds()) < 60, "%f s old; want %f", flows[0].Age, old.Seconds())
}

// If two CPUs have a server's first answer at the same moment, only one measures the handshake.
func TestHandshakeIsMeasuredOnce(t *testing.T) {
	t.Parallel()
	eachOf(t, nil, func(t *testing.T, fx *fixture) {
		fx.service(lb.TCP, "b1")
		before := must.Get(fx.d.Handshakes())(t)[fx.at("b1", 8080)]
		fx.run(tcp(dptest.SYN)(fx).Frame())
		answer := fx.reply(dptest.SYN | dptest.ACK)
		fx.run(answer.Frame())
		table := fx.d.objects.FlowTables()[bpf.GCHalfOpen]
		for k, s := range fx.flowsIn(table).servers {
			s.F.Answered = 0 // as the other CPU read it before
			fx.put(table.Servers, k, s)
		}
		fx.run(answer.Frame())
		after := must.Get(fx.d.Handshakes())(t)[fx.at("b1", 8080)]
		must.Row(t, "handshakes", before.Total()+1, after.Total())
	})
}

// A packet that changes nothing in its flow's state counts as well: a SYN of an established flow, and a later fragment.
func TestFiguresCountPacketsWithoutEffect(t *testing.T) {
	t.Parallel()
	eachOf(t, nil, func(t *testing.T, fx *fixture) {
		established(fx)
		before := fx.onlyFlow().FromClient.Packets
		must.Row(t, "reason", forwarded, fx.run(tcp(dptest.SYN)(fx).Frame()).reason)
		must.Row(t, "packets", before+1, fx.onlyFlow().FromClient.Packets)

		fx.reset()
		fx.service(lb.UDP, "b1")
		p := fx.fromClient(dptest.UDP, 0)
		p.Payload = make([]byte, 1000)
		frames := p.Fragments(7, 400)
		for _, frame := range frames {
			must.Row(t, "reason", forwarded, fx.run(frame).reason)
		}
		must.Row(t, "fragments", lb.FlowFigures{Packets: uint64(len(frames)), Bytes: 1000}, fx.onlyFlow().FromClient)
	})
}

func TestFiguresOfDatagrams(t *testing.T) {
	t.Parallel()
	each(t, func(t *testing.T, h hookName, v6 bool) {
		fx := shared(t, h, v6, nil)
		fx.reset()
		fx.service(lb.UDP, "b1")
		p := fx.fromClient(dptest.UDP, 0)
		p.Payload = make([]byte, 100)
		for range 300 {
			fx.run(p.Frame())
		}
		fx.run(fx.reply(0).Frame())
		f := fx.onlyFlow()
		must.Row(t, "from the client", lb.FlowFigures{Packets: 300, Bytes: 30_000}, f.FromClient)
		must.Row(t, "from the server", lb.FlowFigures{Packets: 1, Bytes: uint64(len("answer"))}, f.FromServer)
		// Four gigabytes later.
		for k, c := range fx.flows().clients {
			c.F.End = math.MaxUint32 - 50
			fx.put(fx.d.objects.SyUdpClients, k, c)
		}
		fx.run(p.Frame())
		must.Row(t, "bytes", uint64(1<<32+49), fx.onlyFlow().FromClient.Bytes)
	})
}
