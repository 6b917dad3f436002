package datapath

import (
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"
	"github.com/google/go-cmp/cmp"
	"github.com/vishvananda/netlink"

	"github.com/steelyard-lb/steelyard/datapath/internal/sysctl"
	"github.com/steelyard-lb/steelyard/e2e/lab/labtest"
	"github.com/steelyard-lb/steelyard/lb"
)

// Cleanup restores the state from before the first start: links, programs, qdiscs, filters, rules, routes, every sysctl
// of the network, and pins.
func TestCleanupLeavesNothing(t *testing.T) {
	t.Parallel()
	labtest.Root(t)
	for _, hook := range labtest.TCHooks(t) {
		for _, mode := range []Mode{ModeXDP, ModeXDPGeneric, ModeTC} {
			t.Run(fmt.Sprintf("%s/%s", mode, hook), func(t *testing.T) {
				var before map[string]string
				change := func(o *Options) {
					o.Mode, o.ForceClsact = mode, hook == "clsact"
					o.SNATPorts = []PortRange{{60900, 61000}} // in part those that the kernel assigns
				}
				fx := newFixtureWith(t, hookTC, false, change, func(fx *fixture) {
					fx.do(func() error { return sysctl.Write(sysctl.ReservedPorts, "8080,9000-9010") })
					fx.addressesSettled()
					before = fx.snapshot()
				})
				if s := fx.d.Interfaces()[0]; s.Mode != mode || s.Hook != hook {
					t.Errorf("attached as %+v", s)
				}
				web(fx)
				fx.do(func() error {
					for _, vip := range []map[string]string{v4, v6} {
						fx.v6 = len(vip["vip"]) > len("203.0.113.10")
						if _, _, err := fx.d.ProbeWay(fx.addr("vip"), fx.addr("b1"), lb.MethodDSR, ""); err != nil {
							return err
						}
					}
					if err := Cleanup(fx.o.PinPath, fx.o.StateDir, quiet); err == nil {
						t.Error("cleanup beside a running agent succeeded")
					}
					return nil
				})
				remains := func(want bool) {
					fx.do(func() error {
						if got, err := Remains(fx.o.PinPath); err != nil || got != want {
							t.Errorf("something remains: %t, %v; want %t", got, err, want)
						}
						return nil
					})
				}
				remains(true)
				during := fx.snapshot()
				for _, changed := range []string{
					sysctl.ReservedPorts, "ip rule", "ip -6 route show table all", "pinned", "programs of lo",
					"/proc/sys/net/ipv4/conf/lo/forwarding", "/proc/sys/net/ipv4/conf/lo/accept_local",
				} {
					if before[changed] == during[changed] {
						t.Errorf("%s is unchanged while the agent runs: the comparison covers nothing", changed)
					}
				}
				fx.close()
				remains(true)
				fx.do(func() error { return Cleanup(fx.o.PinPath, fx.o.StateDir, quiet) })
				remains(false)
				if diff := cmp.Diff(before, fx.snapshot()); diff != "" {
					t.Errorf("before -, after +:\n%s", diff)
				}
			})
		}
	}
}

// snapshot is all state of the node that an agent may change.
func (fx *fixture) snapshot() map[string]string {
	fx.t.Helper()
	s := map[string]string{}
	fx.do(func() error {
		for _, command := range []string{
			"ip -details link show", "ip rule", "ip -6 rule", "ip route show table all", "ip -6 route show table all",
			"tc qdisc show", "tc filter show dev eth0 ingress", "tc filter show dev eth0 egress", "ls -A /run",
		} {
			args := strings.Fields(command)
			out, err := exec.Command(args[0], args[1:]...).CombinedOutput()
			if err != nil {
				out = append(out, err.Error()...) // a filter list of no qdisc
			}
			s[command] = string(out)
		}
		for _, name := range []string{"eth0", "lo"} {
			nic, err := netlink.LinkByName(name)
			if err != nil {
				return err
			}
			for _, at := range []ebpf.AttachType{ebpf.AttachTCXIngress, ebpf.AttachTCXEgress} {
				r, err := link.QueryPrograms(link.QueryOptions{Target: nic.Attrs().Index, Attach: at})
				if err == nil {
					s["programs of "+name] += fmt.Sprintf("%v: %d, ", at, len(r.Programs))
				} else if labtest.TCHook(fx.t) == "tcx" {
					return err
				}
			}
			filters, err := netlink.FilterList(nic, netlink.HANDLE_MIN_EGRESS)
			if err != nil {
				return err
			}
			s["programs of "+name] += fmt.Sprintf("filters: %d", len(filters))
		}
		return filepath.WalkDir("/proc/sys/net", func(path string, e fs.DirEntry, err error) error {
			if err != nil || e.IsDir() {
				return err
			}
			if v, err := os.ReadFile(path); err == nil { // some can only be written
				s[path] = strings.TrimSpace(string(v))
			}
			return nil
		})
	})
	s["pinned"] = strings.Join(fx.pinned(), " ")
	return s
}
