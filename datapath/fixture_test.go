package datapath

import (
	"context"
	"encoding/binary"
	"fmt"
	"log/slog"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/cilium/ebpf"
	"github.com/vishvananda/netlink"

	"github.com/steelyard-lb/steelyard/datapath/dptest"
	"github.com/steelyard-lb/steelyard/e2e/lab"
	"github.com/steelyard-lb/steelyard/e2e/lab/labtest"
	"github.com/steelyard-lb/steelyard/lb"
)

// hook is the program that a packet is run through.
type hook string

const (
	hookXDP hook = "xdp"
	hookTC  hook = "tc"
)

// fixture is a node whose programs are run on packets by BPF_PROG_TEST_RUN, for one address family.
type fixture struct {
	t    *testing.T
	host *lab.Host
	d    *Datapath
	o    Options
	hook hook
	v6   bool
	nic  uint32
	// last is the last packet that was sent on to a backend: replies are made from it.
	last dptest.Packet
}

// Addresses by name, for each family.
var (
	v4 = map[string]string{"box": "192.0.2.1", "client": "192.0.2.100", "b1": "192.0.2.21", "b2": "192.0.2.22", "vip": "203.0.113.10",
		"lost": "198.51.100.9", "far": "198.51.100.77", "router": "192.0.2.254", "stranger": "198.18.0.9", "other": "192.0.2.100", "elsewhere": "203.0.113.99", "home": "203.0.113.50"}
	v6 = map[string]string{"box": "2001:db8::1", "client": "2001:db8::100", "b1": "2001:db8::21", "b2": "2001:db8::22", "vip": "2001:db8:1::10",
		"lost": "2001:db8:9::9", "far": "2001:db8:9::77", "router": "2001:db8::254", "stranger": "2001:db8:77::9", "other": "2001:db8::100", "elsewhere": "2001:db8:1::99", "home": "2001:db8:1::50"}
)

func (w *fixture) addr(name string) netip.Addr {
	if w.v6 {
		return netip.MustParseAddr(v6[name])
	}
	return netip.MustParseAddr(v4[name])
}

func (w *fixture) at(name string, port uint16) netip.AddrPort {
	return netip.AddrPortFrom(w.addr(name), port)
}

var quiet = slog.New(slog.DiscardHandler)

func testOptions() Options {
	return Options{
		Interfaces: []string{"eth0"}, Mode: ModeXDP, MaxFlows: 1000, SNATPorts: [2]uint16{61000, 65535}, TunnelPort: 6090, Timeouts: DefaultTimeouts,
		PinPath: DefaultPinPath, StateDir: DefaultStateDir, Log: quiet,
	}
}

// newFixture makes a host with one uplink whose neighbours are known, and opens a datapath there.
func newFixture(t *testing.T, h hook, isV6 bool, change func(*Options)) *fixture {
	t.Helper()
	return newFixtureWith(t, h, isV6, change, func(*fixture) {})
}

// newFixtureWith is newFixture with changes to the host before the datapath is opened.
func newFixtureWith(t *testing.T, h hook, isV6 bool, change func(*Options), prepare func(*fixture)) *fixture {
	t.Helper()
	l := labtest.New(t)
	w := &fixture{t: t, host: labtest.Host(t, l, "lb"), hook: h, v6: isV6}
	peer := labtest.Host(t, l, "peer")
	end := lab.End{Host: w.host, Name: "eth0", Addresses: []netip.Prefix{netip.MustParsePrefix("192.0.2.1/24"), netip.MustParsePrefix("2001:db8::1/64")}}
	if err := l.Link(end, lab.End{Host: peer, Name: "eth0"}, lab.LinkOptions{SoftwareChecksums: true}); err != nil {
		t.Fatal(err)
	}
	w.o = testOptions()
	if change != nil {
		change(&w.o)
	}
	w.do(func() error {
		nic, err := netlink.LinkByName("eth0")
		if err != nil {
			return err
		}
		w.nic = uint32(nic.Attrs().Index)
		for _, names := range []map[string]string{v4, v6} {
			if err := w.host.AddAddress("lo", hostPrefix(names["home"])); err != nil {
				return err
			}
			far := net.ParseIP(names["far"])
			bits := 8 * len(far)
			if far.To4() != nil {
				far, bits = far.To4(), 32
			}
			if err := netlink.RouteAdd(&netlink.Route{Dst: &net.IPNet{IP: far, Mask: net.CIDRMask(bits, bits)}, Gw: net.ParseIP(names["router"])}); err != nil {
				return fmt.Errorf("route to far: %w", err)
			}
			for _, name := range []string{"client", "b1", "b2", "router"} {
				err := netlink.NeighSet(&netlink.Neigh{
					LinkIndex: nic.Attrs().Index, State: netlink.NUD_PERMANENT,
					IP: net.ParseIP(names[name]), HardwareAddr: net.HardwareAddr{2, 0, 0, 0, 0, 9},
				})
				if err != nil {
					return err
				}
			}
		}
		return nil
	})
	prepare(w)
	w.open()
	return w
}

func hostPrefix(addr string) netip.Prefix {
	a := netip.MustParseAddr(addr)
	return netip.PrefixFrom(a, a.BitLen())
}

// do runs f on the balancer.
func (w *fixture) do(f func() error) {
	w.t.Helper()
	if err := w.host.Do(f); err != nil {
		w.t.Fatal(err)
	}
}

func (w *fixture) open() {
	w.t.Helper()
	w.do(func() (err error) {
		w.d, err = Open(w.o)
		return err
	})
	w.t.Cleanup(func() { w.close() })
}

// reset removes all services and flows.
func (w *fixture) reset() {
	w.t.Helper()
	held, err := w.d.Held()
	if err != nil {
		w.t.Fatal(err)
	}
	w.apply(lb.Delta{Delete: held})
	w.end()
	for _, m := range []*ebpf.Map{w.d.objects.SyFlows, w.d.objects.SyHalfopen, w.d.objects.SyDsrFlows} {
		for k := range entries(w.t, m) {
			if err := m.Delete(&k); err != nil {
				w.t.Fatal(err)
			}
		}
	}
	if err := w.d.services.setLoads(nil); err != nil {
		w.t.Fatal(err)
	}
}

func (w *fixture) close() {
	if w.d == nil {
		return
	}
	if err := w.d.Close(); err != nil {
		w.t.Error(err)
	}
	w.d = nil
}

// service puts the frontend VIP:80 for a protocol, to port 8080 of these backends.
func (w *fixture) service(proto lb.Protocol, backends ...string) *lb.FrontendPlan {
	w.t.Helper()
	return w.serve(func(s *lb.Service) { s.Ports[0].Protocol = proto }, backends...)
}

// serve puts the frontend VIP:80/tcp to port 8080 of these backends, as modified by change.
func (w *fixture) serve(change func(*lb.Service), backends ...string) *lb.FrontendPlan {
	w.t.Helper()
	s := &lb.Service{
		Name: "web", VIPs: []netip.Addr{w.addr("vip")}, Ports: lb.PortsOn(nil, lb.Port{Port: 80, Target: 8080, Protocol: lb.TCP}),
		Algorithm: lb.AlgorithmMaglev, Method: lb.MethodNAT, Check: lb.CheckSpec{Type: lb.CheckNone},
	}
	for _, b := range backends {
		s.Ports[0].Backends = append(s.Ports[0].Backends, lb.Backend{Addr: w.addr(b), Weight: 1})
	}
	change(s)
	p := lb.Build(s, nil, lb.Drains{}).Frontends[0]
	w.apply(lb.Delta{Put: []*lb.FrontendPlan{p}})
	return p
}

func (w *fixture) apply(d lb.Delta) {
	w.t.Helper()
	w.do(func() error {
		for f, err := range w.d.Apply(context.Background(), d) {
			return fmt.Errorf("%s: %w", f, err)
		}
		return nil
	})
}

// result is the result of a packet.
type result struct {
	did    string // sent, dropped or passed
	reason string
	frame  []byte
	out    dptest.Packet // of frame, when it was sent or taken out of a tunnel, and is no fragment
}

// run runs a frame through explain and through the hook, and checks that they agree. Packets that XDP passes are run
// through tc.
func (w *fixture) run(frame []byte) result {
	w.t.Helper()
	r := result{reason: w.explain(frame), frame: frame}
	before := w.counts()
	if w.hook == hookXDP {
		r.did, r.frame = w.runXDP(frame)
	}
	if w.hook == hookTC || r.did == "passed" {
		r.did, r.frame = w.runTC(r.frame)
	}
	// The counted reason is the final one; sending may fail for another reason than explain returns.
	for v, n := range w.counts() {
		if n > before[v] {
			r.reason = v.Reason
		}
	}
	delivered := r.reason == "decapsulated" || r.did == "passed" && r.reason == "forwarded"
	if r.did == "passed" && !delivered && string(r.frame) != string(frame) {
		w.t.Fatalf("a packet was passed on changed:\n%x\n%x", frame, r.frame)
	}
	if (r.did == "sent" || delivered) && !isFragment(r.frame) {
		var err error
		if r.out, err = dptest.Parse(r.frame); err != nil {
			w.t.Fatalf("what was sent: %v\n%x", err, r.frame)
		}
		if r.reason == "forwarded" && r.out.Src.Addr() == w.addr("box") && r.out.Inner == nil && r.out.Src.Port() != 0 {
			w.last = r.out
		}
	}
	return r
}

func isFragment(f []byte) bool {
	if binary.BigEndian.Uint16(f[12:]) == 0x0800 {
		return binary.BigEndian.Uint16(f[20:])&0x3fff != 0
	}
	return binary.BigEndian.Uint16(f[12:]) == 0x86dd && f[20] == 44
}

func (w *fixture) runXDP(frame []byte) (did string, out []byte) {
	w.t.Helper()
	return w.runProgram(w.d.objects.SyXdp, frame, w.xdp(frame), hookXDP.verdicts())
}

func (w *fixture) runTC(frame []byte) (did string, out []byte) {
	w.t.Helper()
	return w.runProgram(w.d.objects.SyTcIn, frame, w.skb(0), hookTC.verdicts())
}

// xdpMd is struct xdp_md.
type xdpMd struct{ Data, DataEnd, DataMeta, Ingress, Queue, Egress uint32 }

// xdp is the context of a frame on the uplink.
func (w *fixture) xdp(frame []byte) xdpMd { return xdpMd{DataEnd: uint32(len(frame)), Ingress: w.nic} }

// verdicts are what the programs of a hook may return.
func (h hook) verdicts() map[uint32]string {
	if h == hookXDP {
		return map[uint32]string{1: "dropped", 2: "passed", 3: "sent", 4: "sent"}
	}
	return map[uint32]string{2: "dropped", 0xffffffff: "passed", 7: "sent"}
}

// skb is the context of a packet on the uplink: struct __sk_buff, of which mark is the third word and ifindex the
// eleventh.
func (w *fixture) skb(mark uint32) []byte {
	skb := make([]byte, 192)
	binary.NativeEndian.PutUint32(skb[8:], mark)
	binary.NativeEndian.PutUint32(skb[40:], w.nic)
	return skb
}

func (w *fixture) runProgram(prog *ebpf.Program, frame []byte, context any, verdicts map[uint32]string) (did string, out []byte) {
	w.t.Helper()
	opts := ebpf.RunOptions{Data: frame, DataOut: make([]byte, len(frame)+256), Context: context}
	var ret uint32
	w.do(func() (err error) {
		ret, err = prog.Run(&opts)
		return err
	})
	if did = verdicts[ret]; did == "" {
		w.t.Fatalf("the program returned %d", ret)
	}
	return did, opts.DataOut
}

func (w *fixture) counts() map[Verdict]uint64 {
	w.t.Helper()
	s, err := w.d.Stats()
	if err != nil {
		w.t.Fatal(err)
	}
	return s.Packets
}

// explain returns the reason that sy_explain gives, having checked that it counted and changed nothing.
func (w *fixture) explain(frame []byte) string {
	w.t.Helper()
	out := make([]byte, len(frame)+256)
	padded := append(frame[:len(frame):len(frame)], make([]byte, 128)...) // room for the verdict
	opts := ebpf.RunOptions{Data: padded, DataOut: out}
	if _, err := w.d.objects.SyExplain.Run(&opts); err != nil {
		w.t.Fatal(err)
	}
	const reasonAt = 36 + 4 // behind the tuple and the action
	return w.d.reasons[binary.NativeEndian.Uint32(opts.DataOut[reasonAt:])]
}

// fromClient is a packet of the client to VIP:80.
func (w *fixture) fromClient(proto uint8, flags uint8) dptest.Packet {
	p := dptest.Packet{Src: w.at("client", 40000), Dst: w.at("vip", 80), Proto: proto, Flags: flags, Payload: []byte("hello"), DF: true}
	if proto == dptest.TCP {
		p.Seq, p.Ack = 1000, 5001
	}
	return p
}

// reply is a packet of the backend to which the last one went.
func (w *fixture) reply(flags uint8) dptest.Packet {
	return dptest.Packet{Src: w.last.Dst, Dst: w.last.Src, Proto: w.last.Proto, Flags: flags, Seq: 5000, Ack: 1001, Payload: []byte("answer")}
}

// each runs f for every hook and family.
func each(t *testing.T, f func(t *testing.T, h hook, v6 bool)) {
	for _, h := range []hook{hookXDP, hookTC} {
		for _, v6 := range []bool{false, true} {
			name := string(h) + "/v4"
			if v6 {
				name = string(h) + "/v6"
			}
			t.Run(name, func(t *testing.T) { f(t, h, v6) })
		}
	}
}

// pinned lists the pins on the balancer.
func (w *fixture) pinned() (names []string) {
	w.t.Helper()
	w.do(func() error {
		return filepath.Walk(DefaultPinPath, func(path string, info os.FileInfo, err error) error {
			if err == nil && !info.IsDir() {
				names = append(names, strings.TrimPrefix(path, DefaultPinPath+"/"))
			}
			return nil
		})
	})
	return names
}
