package datapath

import (
	"os"
	"strings"
	"testing"

	"github.com/vishvananda/netlink"

	"github.com/steelyard-lb/steelyard/datapath/internal/hook"
)

// The command that is logged when settings are read-only does what the agent does, and makes no router.
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
			if fx.d.sysctls.Forwards(name) == "" {
				t.Errorf("%s forwards before", name)
			}
			runSysctl(t, hook.ForwardFix(name))
			if missing := fx.d.sysctls.Forwards(name); missing != "" {
				t.Errorf("%s is not set by %s", missing, hook.ForwardFix(name))
			}
			router, err := os.ReadFile("/proc/sys/net/ipv4/conf/eth0/forwarding")
			if strings.TrimSpace(string(router)) != "0" {
				t.Errorf("eth0 forwards: %q", router)
			}
			return err
		})
	}
}

// runSysctl does what a command of sysctl(8) does, which a minimal system does not have.
func runSysctl(t *testing.T, command string) {
	t.Helper()
	settings, ok := strings.CutPrefix(command, "sysctl -w ")
	if !ok {
		t.Fatalf("%q does not set parameters", command)
	}
	for setting := range strings.FieldsSeq(settings) {
		name, value, _ := strings.Cut(setting, "=")
		path := "/proc/sys/" + strings.NewReplacer(".", "/", "/", ".").Replace(name)
		if err := os.WriteFile(path, []byte(value), 0); err != nil {
			t.Errorf("%s: %v", command, err)
		}
	}
}
