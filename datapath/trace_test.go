package datapath

import (
	"context"
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/cilium/ebpf"
	"github.com/google/go-cmp/cmp"
	"github.com/vishvananda/netlink"

	"github.com/steelyard-lb/steelyard/datapath/dptest"
	"github.com/steelyard-lb/steelyard/datapath/internal/hook"
	"github.com/steelyard-lb/steelyard/lb"
	"github.com/steelyard-lb/steelyard/lb/lbtest/must"
)

// traced is a trace that runs during a test.
type traced struct {
	fx    *fixture
	end   context.CancelFunc
	ended chan error
	// Each call of emit sends a batch.
	batches chan []lb.TraceEvent
}

// trace begins a trace. Until it ends, the fixture runs the programs that are attached.
func (fx *fixture) trace(f lb.TraceFilter) *traced {
	fx.t.Helper()
	ctx, cancel := context.WithCancel(fx.t.Context())
	tr := &traced{fx: fx, end: cancel, ended: make(chan error, 1), batches: make(chan []lb.TraceEvent)}
	go func() {
		tr.ended <- fx.host.Do(func() error {
			return fx.d.Trace(ctx, f, nil, func(batch []lb.TraceEvent) error {
				select {
				case tr.batches <- batch:
				case <-ctx.Done():
				}
				return nil
			})
		})
	}()
	tr.next()
	p := fx.attached()
	fx.programs = &p
	return tr
}

// next returns the next batch.
func (tr *traced) next() []lb.TraceEvent {
	tr.fx.t.Helper()
	select {
	case batch := <-tr.batches:
		return batch
	case err := <-tr.ended:
		must.Need(tr.fx.t, false, "the trace has ended: %v", err)
	}
	return nil
}

// settle returns what was traced of all previous packets. The batch that is due may be older than the last of them.
func (tr *traced) settle() []lb.TraceEvent {
	tr.fx.t.Helper()
	return slices.Concat(tr.next(), tr.next())
}

// packets returns what was traced of f.
func (tr *traced) packets(f func()) (packets []lb.TracedPacket) {
	tr.fx.t.Helper()
	tr.settle()
	f()
	for _, e := range tr.settle() {
		must.Need(tr.fx.t, e.Packet != nil, "packets are missing: %+v", e)
		packets = append(packets, *e.Packet)
	}
	return packets
}

func (tr *traced) stop() {
	tr.fx.t.Helper()
	tr.end()
	must.Do(tr.fx.t, <-tr.ended)
	tr.fx.programs = nil
}

// attached returns the programs that the kernel runs on eth0.
func (fx *fixture) attached() (p hook.Programs) {
	fx.t.Helper()
	open := func(id ebpf.ProgramID) *ebpf.Program {
		prog := must.Get(ebpf.NewProgramFromID(id))(fx.t)
		fx.t.Cleanup(func() { prog.Close() })
		return prog
	}
	ids := fx.attachedIDs()
	p.Decap, p.In, p.Out = open(ids[0]), open(ids[1]), open(ids[2])
	if p.XDP = p.In; fx.o.Mode != ModeTC {
		p.XDP = open(ids[3])
	}
	return p
}

// attachedIDs returns the ids of sy_tc_decap, sy_tc_in, sy_tc_out and, if it is attached, sy_xdp.
func (fx *fixture) attachedIDs() (ids []ebpf.ProgramID) {
	fx.t.Helper()
	var decap uint32
	must.Do(fx.t, fx.d.objects.SyProgs.Lookup(uint32(0), &decap))
	ids = append(ids, ebpf.ProgramID(decap))
	clsact := fx.d.Interfaces()[0].Hook == "clsact"
	fx.onNIC("eth0", func(nic netlink.Link) error {
		for _, d := range []hook.Direction{hook.Inward, hook.Outward} {
			if clsact {
				f, err := hook.ClsactFilter(nic, d)
				if err != nil {
					return err
				}
				ids = append(ids, ebpf.ProgramID(f.Id))
				continue
			}
			info, err := fx.d.hooks.Held[hook.PinName("eth0", d.Pin)].Info()
			if err != nil {
				return err
			}
			ids = append(ids, info.Program)
		}
		if x := nic.Attrs().Xdp; x != nil && x.Attached {
			ids = append(ids, ebpf.ProgramID(x.ProgId))
		}
		return nil
	})
	return ids
}

func start(frame []byte) []byte { return frame[:min(len(frame), 192)] }

// The programs that trace do the same as the others, and record each packet once, as it arrived and as it left.
func TestTracedRows(t *testing.T) {
	t.Parallel()
	eachOnce(t, func(t *testing.T, h hookName, v6 bool) {
		for _, option := range []func(*Options){nil, acceptTunnels} {
			fx := newFixture(t, h, v6, option)
			tr := fx.trace(lb.TraceFilter{})
			for _, r := range rows {
				tunnels := cmp.Equal(fmt.Sprintf("%p", r.option), fmt.Sprintf("%p", acceptTunnels))
				if r.alone || (r.option != nil) != (option != nil) || option != nil && !tunnels ||
					!v6 && r.reason == "neighbour_discovery" {
					continue
				}
				t.Run(r.name, func(t *testing.T) {
					fx.t = t
					r.traced(t, fx, tr)
				})
			}
			fx.t = t
			tr.stop()
		}
	})
}

func (r row) traced(t *testing.T, fx *fixture, tr *traced) {
	fx.reset()
	r.state(fx)
	in := r.in(fx).Frame()
	var got result
	packets := tr.packets(func() { got = fx.run(in) })
	must.Need(t, got.did == r.did && got.reason == r.reason,
		"%s: %s; want %s: %s", got.did, got.reason, r.did, r.reason)
	if r.reason == "not_ours" {
		must.Row(t, "packets of others", nil, packets)
		return
	}
	must.Need(t, len(packets) == 1, "%d records; want 1: %+v", len(packets), packets)
	p := packets[0]
	want := lb.Frame{}
	if p.Action != "drop" {
		want = lb.Frame{Length: len(got.frame), Bytes: start(got.frame)}
	}
	must.Row(t, "reason", r.reason, p.Reason)
	must.Row(t, "before", lb.Frame{Length: len(in), Bytes: start(in)}, p.Before)
	must.Row(t, "after", want.Bytes, p.After.Bytes)
	must.Row(t, "length after", want.Length, p.After.Length)
	must.True(t, p.Interface == "eth0" && p.Meaning != "" && time.Since(p.Time).Abs() < time.Minute, "%+v", p)
	must.True(t, (p.Action == "drop") == (r.did == "dropped"), "%s is %s", r.did, p.Action)
	must.True(t, (p.Egress == "eth0") == (r.did == "sent"), "%s leaves by %q", r.did, p.Egress)
	must.True(t, !p.Backend.IsValid() || slices.Contains([]string{v4["b1"], v4["b2"], v6["b1"], v6["b2"], v4["far"],
		v6["far"]}, p.Backend.Addr().String()), "backend %s", p.Backend)
}

// A filter selects both directions of a flow, drops, or the frontends of a service.
func TestTraceFilters(t *testing.T) {
	t.Parallel()
	eachOnce(t, func(t *testing.T, h hookName, v6 bool) {
		fx := newFixture(t, h, v6, nil)
		connection := func() {
			fx.reset()
			web(fx)
			connect(fx)
			fx.run(fx.fromClient(dptest.TCP, dptest.ACK).Frame()) // by the shortcut
			fx.run(fx.reply(dptest.ACK).Frame())
			unknown := fx.fromClient(dptest.TCP, dptest.ACK)
			unknown.Src = fx.at("client", 40009)
			fx.run(unknown.Frame())
			fx.run(toPort(81)(fx).Frame())
			fx.run(icmpError("router", lastSent)(fx).Frame())
		}
		web(fx)
		all := []string{"forwarded", "forwarded", "forwarded", "forwarded", "forwarded", "no_flow", "no_frontend"}
		for name, tt := range map[string]struct {
			filter lb.TraceFilter
			want   []string
		}{
			"all":            {lb.TraceFilter{}, append(all, "forwarded")},
			"client":         {lb.TraceFilter{Client: fx.addr("client")}, append(all, "forwarded")},
			"another client": {lb.TraceFilter{Client: fx.addr("unknown")}, nil},
			"VIP":            {lb.TraceFilter{VIP: fx.addr("vip")}, append(all, "forwarded")},
			"another VIP":    {lb.TraceFilter{VIP: fx.addr("elsewhere")}, nil},
			"service":        {lb.TraceFilter{Service: "web"}, append(all[:6:6], "forwarded")},
			"drops":          {lb.TraceFilter{Drops: true}, all[5:]},
		} {
			t.Run(name, func(t *testing.T) {
				fx.t = t
				tr := fx.trace(tt.filter)
				defer tr.stop()
				var got []string
				for _, p := range tr.packets(connection) {
					got = append(got, p.Reason)
				}
				must.Equal(t, tt.want, got)
			})
		}
		fx.t = t
	})
}

// A packet that another node has sent here has one record, with the tunnel before and the delivered packet after. The
// pod's reply has one as well.
func TestTraceDelivery(t *testing.T) {
	t.Parallel()
	for _, v6 := range []bool{false, true} {
		fx := newFixture(t, hookTC, v6, func(o *Options) { o.Delivers = true })
		fx.do(func() error { return fx.sources("router") })
		fx.nodes(lb.TCP, "self")
		syn := fx.fromClient(dptest.TCP, dptest.SYN)
		for name, f := range map[string]lb.TraceFilter{
			"all": {}, "client": {Client: fx.addr("client")}, "VIP": {VIP: fx.addr("vip")}, "service": {Service: "web"},
		} {
			tr := fx.trace(f)
			var reply []byte
			packets := tr.packets(func() {
				got := fx.received("router", syn)
				must.Need(t, got.did == "passed" && got.reason == forwarded, "%s: %s", got.did, got.reason)
				answer := dptest.Packet{Src: got.out.Dst, Dst: got.out.Src, Proto: dptest.TCP,
					Flags: dptest.SYN | dptest.ACK, Seq: 5000, Ack: 1001}
				reply = answer.Frame()
				fx.runOut(reply, 0)
			})
			tr.stop()
			must.Need(t, len(packets) == 2, "%s: %d records; want 2: %+v", name, len(packets), packets)
			must.Row(t, name, []string{"tc", "tc-out"}, []string{packets[0].Hook, packets[1].Hook})
			must.Row(t, name, []string{"", "eth0"}, []string{packets[0].Egress, packets[1].Egress})
			must.Row(t, name, fx.addr("b1"), packets[0].Backend.Addr())
			in := must.Get(dptest.Parse(packets[0].Before.Bytes))(t)
			out := must.Get(dptest.Parse(packets[0].After.Bytes))(t)
			must.Row(t, name, fx.addr("router"), in.Src.Addr())
			must.Row(t, name, []string{syn.Src.String(), fx.at("b1", 8080).String()},
				[]string{out.Src.String(), out.Dst.String()})
			must.Row(t, name, start(reply), packets[1].Before.Bytes)
			out = must.Get(dptest.Parse(packets[1].After.Bytes))(t)
			must.Row(t, name, []string{syn.Dst.String(), syn.Src.String()},
				[]string{out.Src.String(), out.Dst.String()})
		}
	}
}
