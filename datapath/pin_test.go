package datapath

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"
	"github.com/steelyard-lb/steelyard/datapath/dptest"
	"github.com/steelyard-lb/steelyard/datapath/internal/hook"
	"github.com/steelyard-lb/steelyard/datapath/internal/pin"
	"github.com/steelyard-lb/steelyard/datapath/internal/sysctl"
	"github.com/steelyard-lb/steelyard/e2e/lab"
	"github.com/steelyard-lb/steelyard/e2e/lab/labtest"
	"github.com/steelyard-lb/steelyard/lb"
	"github.com/steelyard-lb/steelyard/lb/lbtest/must"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// failures are the ways in which the tests below make Open fail: with an interface that has no Ethernet header, after
// one that has, and with a fault after each step.
func failures() map[string]func(*Options) {
	all := map[string]func(*Options){
		"no Ethernet header": func(o *Options) {
			o.Interfaces = []string{"eth0", "tun0"}
			_ = netlink.LinkAdd(&netlink.Tuntap{LinkAttrs: netlink.LinkAttrs{Name: "tun0"}, Mode: unix.IFF_TUN})
		},
	}
	for _, step := range []string{"load", "attach eth0"} {
		all["after "+step] = func(o *Options) {
			o.Timeouts.UDP++ // another build
			o.fault = func(now string) error {
				if now == step {
					return errors.New("injected")
				}
				return nil
			}
		}
	}
	return all
}

// A first start that fails leaves no pin, no attached program and no changed sysctl. The next one succeeds.
func TestFailedFirstStartLeavesNothing(t *testing.T) {
	t.Parallel()
	for name, fail := range failures() {
		for _, hook := range labtest.TCHooks(t) {
			t.Run(name+"/"+hook, func(t *testing.T) {
				t.Parallel()
				l := labtest.New(t)
				fx := &fixture{t: t, host: labtest.Host(t, l, "lb"), hook: hookXDP}
				t.Cleanup(fx.stopCalls)
				ends := []lab.End{{Host: fx.host, Name: "eth0"}, {Host: labtest.Host(t, l, "peer"), Name: "eth0"}}
				must.Do(t, l.Link(ends[0], ends[1], lab.LinkOptions{}))
				fx.o = testOptions()
				fx.o.ForceClsact = hook == "clsact"
				fx.failsAsBefore(fail)
				fx.open()
				s := fx.d.Interfaces()[0]
				must.True(t, s.Hook == hook && s.Mode == ModeXDP, "attached as %+v", s)
			})
		}
	}
}

// A takeover that fails leaves all of the previous agent's maps, links and programs, and packets are forwarded.
func TestFailedTakeoverLeavesPins(t *testing.T) {
	t.Parallel()
	for name, fail := range failures() {
		for _, hook := range labtest.TCHooks(t) {
			t.Run(name+"/"+hook, func(t *testing.T) {
				t.Parallel()
				fx := newFixture(t, hookXDP, false, func(o *Options) { o.ForceClsact = hook == "clsact" })
				established(fx)
				fx.close()
				fx.failsAsBefore(fail)
				must.Row(t, "a packet of the flow was", "sent", fx.runAttached(tcp(dptest.ACK)(fx).Frame()))
				fx.open()
				must.Do(t, fx.flows().want(1, 1))
			})
		}
	}
}

// A version whose maps have other sizes takes over the maps of the previous one as they are, so their flows continue.
func TestTakeoverOfMapsOfOtherSizes(t *testing.T) {
	t.Parallel()
	fx := newFixture(t, hookXDP, false, nil)
	established(fx)
	others := []*ebpf.Map{fx.d.objects.SyWeights, fx.d.objects.SyEnded, fx.d.objects.SyFrags}
	for _, m := range others {
		spec := must.Get(m.Info())(t)
		size := m.MaxEntries() * 2
		path := filepath.Join(fx.o.PinPath, pin.Schema, spec.Name)
		fx.do(func() error {
			larger, err := ebpf.NewMap(&ebpf.MapSpec{Name: spec.Name, Type: m.Type(), KeySize: m.KeySize(),
				ValueSize: m.ValueSize(), MaxEntries: size, Flags: spec.Flags})
			return errors.Join(err, os.Remove(path), larger.Pin(path), larger.Close())
		})
	}
	was := others[0].MaxEntries()
	fx.close()
	fx.open()
	must.Row(t, "size of sy_weights", 2*was, fx.d.objects.SyWeights.MaxEntries())
	must.Do(t, fx.flows().want(1, 1))
	must.Row(t, "a packet of the flow was", "sent", fx.runAttached(tcp(dptest.ACK)(fx).Frame()))
}

// A start that was killed before it published its pins is not taken over.
func TestUnpublishedPinsAreRemoved(t *testing.T) {
	t.Parallel()
	fx := newFixture(t, hookXDP, false, nil)
	fx.service(lb.TCP, "b1")
	fx.close()
	fx.do(func() error { return os.Rename(fx.o.PinPath+"/"+pin.Schema, fx.o.PinPath+"/"+pin.Unpublished) })
	fx.open()
	must.Row(t, "held", nil, must.Get(fx.d.Held())(t))
	for _, name := range fx.pinned() {
		must.True(t, strings.HasPrefix(name, pin.Schema+"/"), "%s is still pinned", name)
	}
}

// Directories that no version takes over do not keep the agent from starting: another version's killed first start, and
// empty ones.
func TestUnusedDirectoriesAreRemoved(t *testing.T) {
	t.Parallel()
	fx := newFixture(t, hookXDP, false, nil)
	fx.service(lb.TCP, "b1")
	fx.close()
	fx.do(func() error {
		for _, dir := range []string{"v5/links", "v5/slots", "v9-new/links", "v9-new/chunks"} {
			if err := os.MkdirAll(filepath.Join(fx.o.PinPath, dir), 0o700); err != nil {
				return err
			}
		}
		return pinArray(filepath.Join(fx.o.PinPath, "v9-new", "sy_flows"))
	})
	fx.open()
	must.Row(t, "frontends of the earlier agent", 1, len(must.Get(fx.d.Held())(t)))
	fx.do(func() error {
		dirs, err := filepath.Glob(filepath.Join(fx.o.PinPath, "*"))
		must.Equal(t, []string{filepath.Join(fx.o.PinPath, pin.Schema)}, dirs)
		return err
	})
}

// State of another schema is neither taken over nor changed.
func TestOtherSchemaIsRefused(t *testing.T) {
	t.Parallel()
	fx := newFixture(t, hookXDP, false, nil)
	fx.close()
	fx.do(func() error {
		return os.Rename(filepath.Join(fx.o.PinPath, pin.Schema), filepath.Join(fx.o.PinPath, "v4"))
	})
	before := fx.inForce()
	fx.refused("state of schema v4", "steelyard cleanup")
	must.Equal(t, before, fx.inForce())
}

// pinArray pins a map with one entry.
func pinArray(path string) error {
	m, err := ebpf.NewMap(&ebpf.MapSpec{Type: ebpf.Array, KeySize: 4, ValueSize: 4, MaxEntries: 1})
	if err != nil {
		return err
	}
	defer m.Close()
	return m.Pin(path)
}

// inForce returns everything that a failed Open could leave or remove: each pin with its object's id and, for links,
// their program's id; the tail-called program; and eth0's filters and sysctls.
func (fx *fixture) inForce() map[string]string {
	fx.t.Helper()
	s := map[string]string{}
	fx.do(func() error {
		err := filepath.WalkDir(fx.o.PinPath, func(path string, e fs.DirEntry, err error) error {
			switch {
			case errors.Is(err, fs.ErrNotExist):
				return nil
			case err != nil || e.IsDir():
				return err
			}
			s[path], err = describePin(path)
			return err
		})
		nic, errNIC := netlink.LinkByName("eth0")
		if err := errors.Join(err, errNIC); err != nil {
			return err
		}
		s["XDP of eth0"] = fmt.Sprint(nic.Attrs().Xdp.Attached, nic.Attrs().Xdp.ProgId)
		for _, d := range []hook.Direction{hook.Inward, hook.Outward} {
			f, err := hook.ClsactFilter(nic, d)
			if err != nil {
				return err
			}
			if f != nil {
				s["filter "+d.Pin] = fmt.Sprint(f.Id)
			}
			r, err := link.QueryPrograms(link.QueryOptions{Target: nic.Attrs().Index, Attach: d.Attach})
			if err == nil {
				s[d.Pin] = fmt.Sprint(len(r.Programs))
			} else if labtest.TCHook(fx.t) == "tcx" {
				return err
			}
		}
		for _, path := range []string{
			sysctl.Path("ipv4", "lo", "forwarding"), sysctl.Path("ipv6", "lo", "forwarding"), sysctl.ReservedPorts,
		} {
			value, err := os.ReadFile(path)
			if err != nil {
				return err
			}
			s[path] = string(value)
		}
		return nil
	})
	return s
}

// describePin returns the ids of the object pinned at path.
func describePin(path string) (string, error) {
	if l, err := link.LoadPinnedLink(path, nil); err == nil {
		defer l.Close()
		info, err := l.Info()
		if err != nil {
			return "", err
		}
		return fmt.Sprintf("link %d, program %d", info.ID, info.Program), nil
	}
	if p, err := ebpf.LoadPinnedProgram(path, nil); err == nil {
		defer p.Close()
		return fmt.Sprintf("program %d", idOf(p)), nil
	}
	m, err := ebpf.LoadPinnedMap(path, nil)
	if err != nil {
		return "", err
	}
	defer m.Close()
	info, err := m.Info()
	if err != nil {
		return "", err
	}
	id, _ := info.ID()
	if m.Type() != ebpf.ProgramArray {
		return fmt.Sprintf("map %d", id), nil
	}
	var prog uint32
	err = m.Lookup(uint32(0), &prog)
	return fmt.Sprintf("map %d, program %d", id, prog), err
}

// runAttached runs a frame through the XDP program attached to eth0.
func (fx *fixture) runAttached(frame []byte) (did string) {
	fx.t.Helper()
	fx.do(func() error {
		path := filepath.Join(fx.o.PinPath, pin.Schema, "links", hook.PinName("eth0", string(ModeXDP)))
		l, err := link.LoadPinnedLink(path, nil)
		if err != nil {
			return err
		}
		defer l.Close()
		info, err := l.Info()
		if err != nil {
			return err
		}
		prog, err := ebpf.NewProgramFromID(info.Program)
		if err != nil {
			return err
		}
		defer prog.Close()
		ret, err := prog.Run(&ebpf.RunOptions{Data: frame, Context: fx.xdp(frame)})
		did = hookXDP.verdicts()[ret]
		return err
	})
	return did
}

// An agent whose pins are hidden by another mount takes over the previous agent's links, and serves. Cleanup detaches
// them.
func TestHiddenPins(t *testing.T) {
	t.Parallel()
	if labtest.TCHook(t) != "tcx" {
		return // clsact filters have no pins
	}
	for _, mode := range []Mode{ModeTC, ModeXDP} {
		t.Run(string(mode), func(t *testing.T) {
			fx, x := verified(t, mode, false, nil, func(*fixture) {})
			fx.service(lb.TCP, "b1")
			fx.close()
			hide := func() error { return unix.Mount("bpf", filepath.Dir(fx.o.PinPath), "bpf", 0, "") }
			fx.do(hide)
			fx.open()
			fx.d.OnFault(x.changed)
			fx.service(lb.TCP, "b1")
			fx.changed()
			attached := func() (all []link.ID) {
				fx.do(func() error {
					nic, err := netlink.LinkByName("eth0")
					if err != nil {
						return err
					}
					in, err := hook.TCXLinks(nic.Attrs().Index, hook.Inward.Attach)
					out, errOut := hook.TCXLinks(nic.Attrs().Index, hook.Outward.Attach)
					first, errFirst := hook.XDPLinks(nic)
					all = slices.Concat(in, out, first)
					return errors.Join(err, errOut, errFirst)
				})
				return all
			}
			want := 2
			if mode == ModeXDP {
				want = 3
			}
			s := fx.d.Interfaces()[0]
			must.True(t, s.Mode == mode && len(attached()) == want, "%+v, links %v", s, attached())
			e := fx.explainClient()
			must.True(t, e.Fault == "" && e.Reply == forwarded, "explain: reply %q, fault %q", e.Reply, e.Fault)
			fx.close()
			fx.do(hide)
			fx.do(func() error { return Cleanup(fx.o.PinPath, fx.o.StateDir, quiet) })
			must.Row(t, "links after cleanup", nil, attached())
		})
	}
}

// Hidden pins are used and locked again when they reappear.
func TestHiddenPinsAreShownAgain(t *testing.T) {
	t.Parallel()
	fx, x := verified(t, ModeTC, false, nil, func(*fixture) {})
	fx.service(lb.TCP, "b1")
	fx.changed()
	before, dir := fx.pinned(), filepath.Dir(fx.o.PinPath)
	for _, change := range []func() error{
		func() error { return unix.Mount("bpf", dir, "bpf", 0, "") },
		func() error { return unix.Unmount(dir, unix.MNT_DETACH) },
	} {
		fx.do(change)
		fx.changed()
		must.Equal(t, before, fx.pinned())
		fx.refused("another agent is running")
	}
	x.is("")
}

// failsAsBefore checks that Open fails with these options and changes nothing.
func (fx *fixture) failsAsBefore(fail func(*Options)) {
	fx.t.Helper()
	before, o := fx.inForce(), fx.o
	fx.do(func() error { fail(&fx.o); return nil })
	fx.refused()
	fx.o = o
	must.Equal(fx.t, before, fx.inForce())
}
