package datapath

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"
	"github.com/steelyard-lb/steelyard/datapath/internal/hook"
	"github.com/steelyard-lb/steelyard/datapath/internal/sysctl"
	"github.com/steelyard-lb/steelyard/e2e/lab/labtest"
	"github.com/steelyard-lb/steelyard/lb"
	"github.com/steelyard-lb/steelyard/lb/lbtest"
	"github.com/steelyard-lb/steelyard/lb/lbtest/must"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// Cleanup restores the state from before the first start: links, programs, qdiscs, filters, rules, routes, all network
// sysctls, and pins.
func TestCleanupLeavesNothing(t *testing.T) {
	t.Parallel()
	labtest.Root(t)
	for _, hook := range labtest.TCHooks(t) {
		for _, mode := range []Mode{ModeXDP, ModeXDPGeneric, ModeTC} {
			t.Run(fmt.Sprintf("%s/%s", mode, hook), func(t *testing.T) {
				var before map[string]string
				change := func(o *Options) {
					o.Mode, o.ForceClsact = mode, hook == "clsact"
					o.SNATPorts = []PortRange{{60900, 61000}} // the kernel also assigns some of these
				}
				fx := newFixtureWith(t, hookTC, false, change, func(fx *fixture) {
					fx.do(func() error { return sysctl.Write(sysctl.ReservedPorts, "8080,9000-9010") })
					fx.addressesSettled()
					before = fx.snapshot()
				})
				s := fx.d.Interfaces()[0]
				must.True(t, s.Mode == mode && s.Hook == hook, "attached as %+v", s)
				web(fx)
				fx.do(func() error {
					for _, vip := range []map[string]string{v4, v6} {
						fx.v6 = len(vip["vip"]) > len("203.0.113.10")
						if _, _, err := fx.d.ProbeWay(fx.addr("vip"), fx.addr("b1"), lb.MethodDSR, ""); err != nil {
							return err
						}
					}
					must.True(t, Cleanup(fx.o.PinPath, fx.o.StateDir, quiet) != nil,
						"cleanup beside a running agent succeeded")
					return nil
				})
				remains := func(want bool) {
					fx.do(func() error {
						got, err := Remains(fx.o.PinPath)
						must.True(t, err == nil && got == want, "something remains: %t, %v; want %t", got, err, want)
						return nil
					})
				}
				remains(true)
				during := fx.snapshot()
				for _, changed := range []string{
					sysctl.ReservedPorts, "ip rule", "ip -6 route show table all", "pinned", "programs of lo",
					"/proc/sys/net/ipv4/conf/lo/forwarding", "/proc/sys/net/ipv4/conf/lo/accept_local",
				} {
					must.True(t, before[changed] != during[changed],
						"%s is unchanged while the agent runs: the comparison covers nothing", changed)
				}
				fx.close()
				remains(true)
				fx.do(func() error { return Cleanup(fx.o.PinPath, fx.o.StateDir, quiet) })
				remains(false)
				must.Row(t, "before and after", before, fx.snapshot())
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
				out = append(out, err.Error()...) // a list of filters without a qdisc
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
			if v, err := os.ReadFile(path); err == nil { // some are write-only
				s[path] = strings.TrimSpace(string(v))
			}
			return nil
		})
	})
	s["pinned"] = strings.Join(fx.pinned(), " ")
	return s
}

// No other user can change the directory of the pins, which may be all that a container sees of the bpffs. A bpffs to
// which other users may write is a warning.
func TestOwnerOfThePins(t *testing.T) {
	t.Parallel()
	fx := newFixture(t, hookXDP, false, nil)
	warnings := func() (list string) {
		fx.do(func() error { list = strings.Join(lbtest.Texts(fx.d.Findings()), "; "); return nil })
		return list
	}
	w := warnings()
	must.True(t, !strings.Contains(w, "bpffs"), "warnings %q", w)
	fx.close()
	root := filepath.Dir(fx.o.PinPath)
	for _, tt := range []struct {
		change, undo func() error
		want         string
	}{
		{func() error { return os.Chown(fx.o.PinPath, 65534, -1) },
			func() error { return os.Chown(fx.o.PinPath, 0, -1) }, "belongs to user 65534"},
		{func() error { return os.Chmod(fx.o.PinPath, 0o777) },
			func() error { return os.Chmod(fx.o.PinPath, 0o755) }, "can be written by other users (mode 0777)"},
	} {
		fx.do(tt.change)
		fx.refused(tt.want)
		fx.do(tt.undo)
	}
	fx.do(func() error {
		if err := unix.Mount(fx.o.PinPath, fx.o.PinPath, "", unix.MS_BIND, ""); err != nil {
			return err
		}
		return os.Chmod(root, 0o1777|os.ModeSticky)
	})
	fx.open()
	w = warnings()
	must.True(t, strings.Contains(w, "may write to the bpffs /sys/fs/bpf (dtrwxrwxrwx)"), "warnings %q", w)
	fx.close()
	fx.do(func() error {
		if err := Cleanup(fx.o.PinPath, fx.o.StateDir, quiet); err != nil {
			return err
		}
		left, err := os.ReadDir(fx.o.PinPath)
		must.True(t, len(left) == 0, "after the cleanup: %v", left)
		return err
	})
}

// The command that is logged if settings are read-only does the same as the agent, and does not turn the node into a
// router.
func TestForwardFix(t *testing.T) {
	t.Parallel()
	fx := newFixture(t, hookTC, false, nil)
	const vlan = "eth0.7"
	fx.do(func() error {
		return netlink.LinkAdd(&netlink.Veth{LinkAttrs: netlink.LinkAttrs{Name: vlan}, PeerName: "peer7"})
	})
	for _, path := range []string{"ipv4/conf/lo/accept_local", "ipv4/conf/lo/forwarding", "ipv6/conf/lo/forwarding"} {
		fx.do(func() error { return setSysctl(path, "0")(fx) })
	}
	for _, name := range []string{"lo", vlan} {
		fx.do(func() error {
			must.True(t, fx.d.sysctls.Forwards(name) != "", "%s forwards before", name)
			runSysctl(t, hook.ForwardFix(name))
			must.Row(t, "not set by "+hook.ForwardFix(name), "", fx.d.sysctls.Forwards(name))
			router, err := os.ReadFile("/proc/sys/net/ipv4/conf/eth0/forwarding")
			must.True(t, strings.TrimSpace(string(router)) == "0", "eth0 forwards: %q", router)
			return err
		})
	}
}

// runSysctl runs a sysctl(8) command, which a minimal system does not have.
func runSysctl(t *testing.T, command string) {
	t.Helper()
	settings, ok := strings.CutPrefix(command, "sysctl -w ")
	must.Need(t, ok, "%q does not set parameters", command)
	for setting := range strings.FieldsSeq(settings) {
		name, value, _ := strings.Cut(setting, "=")
		path := "/proc/sys/" + strings.NewReplacer(".", "/", "/", ".").Replace(name)
		must.Do(t, os.WriteFile(path, []byte(value), 0))
	}
}

// On a full disk, a finding says that Cleanup cannot restore the settings. They are stored once there is space again.
func TestSysctlsOnAFullDisk(t *testing.T) {
	t.Parallel()
	labtest.Root(t)
	disk := t.TempDir()
	must.Do(t, unix.Mount("tmpfs", disk, "tmpfs", 0, "nr_inodes=1"))
	t.Cleanup(func() { unix.Unmount(disk, unix.MNT_DETACH) })
	const forwarding = "/proc/sys/net/ipv4/conf/lo/forwarding"
	var was []byte
	fx, _ := verified(t, ModeTC, false, func(o *Options) { o.StateDir = disk }, func(fx *fixture) {
		fx.do(func() (err error) { was, err = os.ReadFile(forwarding); return err })
	})
	const problem = `values of sysctls for "steelyard cleanup" not stored: `
	list := lbtest.Texts(fx.d.Findings())
	must.True(t, len(list) == 1 && strings.HasPrefix(list[0], problem) &&
		strings.Contains(list[0], unix.ENOSPC.Error()), "problems %q", list)
	must.Do(t, unix.Mount("tmpfs", disk, "tmpfs", unix.MS_REMOUNT, "nr_inodes=100"))
	fx.do(func() error { fx.d.hooks.RepairForwarding(); return nil })
	must.Row(t, "problems with space on the disk", nil, lbtest.Texts(fx.d.Findings()))
	fx.close()
	fx.do(func() error {
		now, err := os.ReadFile(forwarding)
		must.True(t, string(now) == "1\n" && string(now) != string(was),
			"forwarding on lo is %q, and was %q: the test covers nothing", now, was)
		err = errors.Join(err, Cleanup(fx.o.PinPath, fx.o.StateDir, quiet))
		if now, e := os.ReadFile(forwarding); string(now) != string(was) || e != nil {
			err = errors.Join(err, e, fmt.Errorf("forwarding on lo is %q after Cleanup, and was %q", now, was))
		}
		return err
	})
}
