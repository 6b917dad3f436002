package datapath

import (
	"bytes"
	"compress/gzip"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"
	"github.com/google/go-cmp/cmp"
	"github.com/vishvananda/netlink"

	"github.com/steelyard-lb/steelyard/datapath/dptest"
	"github.com/steelyard-lb/steelyard/lb"
)

// releaseV5 is the datapath of the first release: its object, with the pins and links that its agent makes.
type releaseV5 struct {
	fx    *fixture
	maps  map[string]*ebpf.Map
	inner *ebpf.MapSpec // of a table
	xdp   *ebpf.Program
}

// openV5Release starts it on eth0 with these backends.
func openV5Release(fx *fixture, backends ...string) *releaseV5 {
	fx.t.Helper()
	packed, err := os.ReadFile("testdata/v5_bpfel.o.gz")
	if err != nil {
		fx.t.Fatal(err)
	}
	z, err := gzip.NewReader(bytes.NewReader(packed))
	if err != nil {
		fx.t.Fatal(err)
	}
	var object bytes.Buffer
	if _, err := object.ReadFrom(z); err != nil {
		fx.t.Fatal(err)
	}
	spec, err := ebpf.LoadCollectionSpecFromReader(bytes.NewReader(object.Bytes()))
	if err != nil {
		fx.t.Fatal(err)
	}
	r := &releaseV5{fx: fx, inner: spec.Maps["tables"].InnerMap}
	fx.do(func() error {
		dir := filepath.Join(fx.o.PinPath, "v5")
		if err := mountBPF(filepath.Dir(fx.o.PinPath)); err != nil {
			return err
		}
		if err := os.MkdirAll(filepath.Join(dir, "links"), 0o700); err != nil {
			return err
		}
		for name, m := range spec.Maps {
			if !strings.HasPrefix(name, ".") {
				m.Pinning = ebpf.PinByName
			}
		}
		for name, value := range map[string]any{"no_xdp_tx": uint8(1), "tunnel_port": fx.o.TunnelPort} {
			if err := spec.Variables[name].Set(value); err != nil {
				return err
			}
		}
		c, err := ebpf.NewCollectionWithOptions(spec, ebpf.CollectionOptions{Maps: ebpf.MapOptions{PinPath: dir}})
		if err != nil {
			return err
		}
		fx.t.Cleanup(c.Close)
		r.maps, r.xdp = c.Maps, c.Programs["sy_xdp"]
		if err := r.maps["next"].Put(uint32(0), c.Programs["sy_tc_inside"]); err != nil {
			return err
		}
		sys, err := openSysctls(fx.o.StateDir)
		if err != nil {
			return err
		}
		if err := sys.forward("eth0"); err != nil {
			return err
		}
		return r.attach(c.Programs, dir)
	})
	r.put("uplinks", fx.nic, uint32(1))
	for i, b := range backends {
		r.put("backends", uint32(i), backendV5{Addr: toAddr(fx.addr(b)), Port: swap(8080),
			Snat: [4]syAddr{toAddr(fx.addr("self"))}})
	}
	return r
}

// attach attaches the programs as its agent does.
func (r *releaseV5) attach(progs map[string]*ebpf.Program, dir string) error {
	index := int(r.fx.nic)
	pin := func(l link.Link, err error, kind string) error {
		if err != nil {
			return err
		}
		defer l.Close()
		return l.Pin(filepath.Join(dir, "links", pinName("eth0", kind)))
	}
	l, err := link.AttachXDP(link.XDPOptions{Program: r.xdp, Interface: index, Flags: link.XDPDriverMode})
	if err := pin(l, err, "xdp"); err != nil {
		return err
	}
	nic, err := netlink.LinkByName("eth0")
	if err == nil && r.fx.tcHook() == "clsact" {
		err = netlink.QdiscAdd(clsactQdisc(nic))
	}
	if err != nil {
		return err
	}
	for name, d := range map[string]direction{"sy_tc_in": inward, "sy_tc_out": outward} {
		if r.fx.tcHook() == "clsact" {
			err = setFilter(nic, d, progs[name])
		} else {
			l, errLink := link.AttachTCX(link.TCXOptions{Interface: index, Program: progs[name], Attach: d.attach})
			err = pin(l, errLink, d.pin)
		}
		if err != nil {
			return err
		}
	}
	return nil
}

func (r *releaseV5) put(name string, key, value any) {
	r.fx.t.Helper()
	if err := r.maps[name].Put(key, value); err != nil {
		r.fx.t.Fatal(err)
	}
}

// serve puts a frontend for a port or range of the VIP, whose table has all backends in turn.
func (r *releaseV5) serve(id uint32, f lb.Frontend, method syMethod, change func(*frontendV5)) {
	r.fx.t.Helper()
	f.VIP = r.fx.addr("vip")
	v := frontendV5{ID: id, Method: uint8(method), Spread: 1, First: swap(f.Port)}
	change(&v)
	const slots = 16
	inner := r.inner.Copy() // with the BTF of the template, which Linux before 6.2 compares
	inner.MaxEntries = 1 + slots
	m, err := ebpf.NewMap(inner)
	if err != nil {
		r.fx.t.Fatal(err)
	}
	r.fx.t.Cleanup(func() { m.Close() })
	for i := range uint32(1 + slots) {
		slot := [4]uint32{i % 2, noBackendV5, noBackendV5, noBackendV5}
		if i == 0 {
			slot = [4]uint32{slots, 0}
		}
		if err := m.Put(i, slot); err != nil {
			r.fx.t.Fatal(err)
		}
	}
	r.put("tables", id, m)
	if f.Last == 0 {
		r.put("frontends", toFrontendKey(f), v)
	} else {
		for _, k := range toRangeKeys(f) {
			r.put("ranges", k, v)
		}
	}
	r.put("vips", toAddr(f.VIP), syVip{Up: 1, Ranges: 1})
}

// sent runs a packet through the programs of the release and returns what it sends.
func (r *releaseV5) sent(p dptest.Packet) dptest.Packet {
	r.fx.t.Helper()
	frame := p.Frame()
	did, out := r.fx.runProgram(r.xdp, frame, r.fx.xdp(frame), hookXDP.verdicts())
	if did != "sent" {
		r.fx.t.Fatalf("the first release %s %+v", did, p)
	}
	sent, err := dptest.Parse(out)
	if err != nil {
		r.fx.t.Fatal(err)
	}
	return sent
}

// openFlow is a flow that the first release forwards.
type openFlow struct {
	name   string
	client dptest.Packet // its next packet
	to     dptest.Packet // what that becomes; with NAT the addresses count
}

// open makes n flows to a port of the VIP, half of them half-open.
func (r *releaseV5) open(proto uint8, port uint16, n int, tunnel bool) (flows []openFlow) {
	r.fx.t.Helper()
	for i := range n {
		p := r.fx.fromClient(proto, dptest.SYN)
		p.Src, p.Dst = r.fx.at("client", uint16(20000+i)), r.fx.at("vip", port)
		f := openFlow{name: fmt.Sprintf("flow %d to port %d/%d", i, port, proto)}
		f.to = r.sent(p)
		p.Flags, p.Seq = dptest.ACK, p.Seq+1+uint32(len(p.Payload))
		f.client = p
		if !tunnel {
			r.sent(answer(f.to, dptest.SYN|dptest.ACK, 5000))
		}
		if i%2 == 0 {
			f.to = r.sent(p)
		}
		flows = append(flows, f)
	}
	return flows
}

// answer is a packet of the server that p was sent to.
func answer(p dptest.Packet, flags uint8, seq uint32) dptest.Packet {
	return dptest.Packet{Src: p.Dst, Dst: p.Src, Proto: p.Proto, Flags: flags, Seq: seq, Ack: p.Seq + 1,
		Payload: []byte("answer")}
}

// Flows of the first release continue under this one, each with its server and source port, in both directions: TCP and
// UDP, half-open and established, NAT and tunnel, to single ports and ranges. Nothing of it remains.
func TestUpgradeFromV5(t *testing.T) {
	t.Parallel()
	eachOnce(t, func(t *testing.T, h hook, v6 bool) {
		var old *releaseV5
		var nat, tunnel []openFlow
		fx := newFixtureWith(t, h, v6, func(o *Options) {
			o.HashSeed[0], o.ForceClsact = 1, h == hookTC && v6 // as on kernels before 6.6
		}, func(fx *fixture) {
			old = openV5Release(fx, "b1", "b2")
			none := func(*frontendV5) {}
			old.serve(7, lb.Frontend{Port: 80, Protocol: lb.TCP}, syMethodMETHOD_NAT, none)
			old.serve(3, lb.Frontend{Port: 81, Protocol: lb.UDP}, syMethodMETHOD_NAT, none)
			old.serve(9, lb.Frontend{Port: 8000, Last: 8009, Protocol: lb.TCP}, syMethodMETHOD_NAT, none)
			old.serve(5, lb.Frontend{Port: 82, Protocol: lb.TCP}, syMethodMETHOD_GUE, none)
			nat = append(nat, old.open(dptest.TCP, 80, 20, false)...)
			nat = append(nat, old.open(dptest.UDP, 81, 20, false)...)
			nat = append(nat, old.open(dptest.TCP, 8003, 20, false)...)
			tunnel = old.open(dptest.TCP, 82, 20, true)
		})
		for _, f := range nat {
			r := fx.run(f.client.Frame())
			if r.did != "sent" || r.out.Src != f.to.Src || r.out.Dst != f.to.Dst {
				t.Errorf("%s: %s (%s) from %s to %s; want from %s to %s",
					f.name, r.did, r.reason, r.out.Src, r.out.Dst, f.to.Src, f.to.Dst)
			}
			r = fx.run(answer(f.to, dptest.ACK, 5001).Frame())
			if r.did != "sent" || r.out.Src != f.client.Dst || r.out.Dst != f.client.Src {
				t.Errorf("%s: an answer was %s (%s) from %s to %s", f.name, r.did, r.reason, r.out.Src, r.out.Dst)
			}
		}
		for _, f := range tunnel {
			if r := fx.run(f.client.Frame()); r.did != "sent" || r.out.Dst.Addr() != f.to.Dst.Addr() {
				t.Errorf("%s: %s (%s) to %s; want to %s", f.name, r.did, r.reason, r.out.Dst, f.to.Dst)
			}
		}
		if held, err := fx.d.Held(); err != nil || len(held) != 4 {
			t.Errorf("held %v, %v", held, err)
		}
		for _, name := range fx.pinned() {
			if !strings.HasPrefix(name, schema+"/") {
				t.Errorf("%s is still pinned", name)
			}
		}
		fx.checkOneProgram()
	})
}

// An upgrade that fails leaves the first release in force, and one that was killed after it had published its pins is
// completed by the next start.
func TestFailedUpgradeFromV5(t *testing.T) {
	t.Parallel()
	for name, fail := range failures() {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			newFixtureWith(t, hookXDP, false, nil, func(fx *fixture) {
				old := openV5Release(fx, "b1", "b2")
				old.serve(7, lb.Frontend{Port: 80, Protocol: lb.TCP}, syMethodMETHOD_NAT, func(*frontendV5) {})
				flow := old.open(dptest.TCP, 80, 1, false)[0]
				before := fx.inForce()
				fx.do(func() error {
					o := fx.o
					fail(&o)
					if d, err := Open(o); err == nil {
						d.Close()
						return errors.New("Open succeeded")
					}
					return nil
				})
				if diff := cmp.Diff(before, fx.inForce()); diff != "" {
					t.Errorf("before -, after +:\n%s", diff)
				}
				if to := old.sent(flow.client); to.Src != flow.to.Src || to.Dst != flow.to.Dst {
					t.Errorf("a packet was sent from %s to %s; want from %s to %s",
						to.Src, to.Dst, flow.to.Src, flow.to.Dst)
				}
			})
		})
	}
	fx := newFixture(t, hookXDP, false, nil)
	established(fx)
	fx.close()
	fx.do(func() error {
		dir := filepath.Join(fx.o.PinPath, "v5")
		xdp := filepath.Join("links", pinName("eth0", "xdp"))
		return errors.Join(os.MkdirAll(filepath.Join(dir, "links"), 0o700), pinArray(filepath.Join(dir, "flows")),
			os.Link(filepath.Join(fx.o.PinPath, schema, xdp), filepath.Join(dir, xdp)))
	})
	fx.open()
	if err := fx.flows().want(1, 1); err != nil {
		t.Error(err)
	}
	for _, name := range fx.pinned() {
		if !strings.HasPrefix(name, schema+"/") {
			t.Errorf("%s is still pinned", name)
		}
	}
	fx.checkOneProgram()
}

// The numbers of a converted flow are those of its next packets: then a RST with them ends it. A forged RST does not,
// with whatever number, before as after.
func TestConvertedFlowsFollowNumbers(t *testing.T) {
	t.Parallel()
	var flows []openFlow
	fx := newFixtureWith(t, hookXDP, false, nil, func(fx *fixture) {
		old := openV5Release(fx, "b1", "b2")
		old.serve(7, lb.Frontend{Port: 80, Protocol: lb.TCP}, syMethodMETHOD_NAT, func(*frontendV5) {})
		flows = old.open(dptest.TCP, 80, 2, false)
	})
	states := func() (closed int) {
		for _, f := range fx.flows().clients {
			if f.F.State == uint8(syFlowStateFLOW_CLOSED) || f.F.Doubt == uint8(syFlowDoubtDOUBT_RESET) {
				closed++
			}
		}
		return closed
	}
	for _, f := range flows {
		forged := f.client
		for _, forged.Seq = range []uint32{0, 1, 1 << 31} {
			forged.Flags = dptest.RST
			fx.run(forged.Frame())
		}
		fx.run(f.client.Frame())
		forged.Seq = 1 << 31
		fx.run(forged.Frame())
		if n := states(); n != 0 {
			t.Fatalf("%s: a forged RST had an effect", f.name)
		}
	}
	for i, f := range flows {
		end := f.client
		end.Flags, end.Seq, end.Payload = dptest.RST, end.Seq+uint32(len(end.Payload)), nil
		fx.run(end.Frame())
		if n := states(); n != i+1 {
			t.Errorf("%s: %d flows ended by a RST; want %d", f.name, n, i+1)
		}
	}
	for k, f := range fx.flows().clients {
		if f.F.Doubt != 0 || f.F.State != uint8(syFlowStateFLOW_CLOSED) {
			t.Errorf("flow %+v ends as %+v", k, f.F)
		}
	}
}

// A server answers a SYN with an invented source again and again: that does not establish a converted flow.
func TestConvertedHalfOpenFlowsWaitForClient(t *testing.T) {
	t.Parallel()
	eachOnce(t, func(t *testing.T, h hook, v6 bool) {
		var flow openFlow
		fx := newFixtureWith(t, h, v6, nil, func(fx *fixture) {
			old := openV5Release(fx, "b1", "b2")
			old.serve(7, lb.Frontend{Port: 80, Protocol: lb.TCP}, syMethodMETHOD_NAT, func(*frontendV5) {})
			flow = old.open(dptest.TCP, 80, 2, false)[1]
			if flow.client.Flags != dptest.ACK {
				t.Fatal("no acknowledgement to send")
			}
		})
		state := func() (s syFlowState) {
			for k, f := range fx.flows().clients {
				if k.Sport == swap(flow.client.Src.Port()) {
					s = syFlowState(f.F.State)
				}
			}
			return s
		}
		for range 3 {
			if r := fx.run(answer(flow.to, dptest.SYN|dptest.ACK, 5000).Frame()); r.did != "sent" {
				t.Fatalf("the answer was %s (%s)", r.did, r.reason)
			}
		}
		if s := state(); s != syFlowStateFLOW_HALF_OPEN {
			t.Errorf("after answers of the server its state is %d", s)
		}
		fx.run(flow.client.Frame())
		if s := state(); s != syFlowStateFLOW_ESTABLISHED {
			t.Errorf("after an acknowledgement of the client its state is %d", s)
		}
	})
}
