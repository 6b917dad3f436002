package inside

import (
	"log/slog"
	"net/netip"
	"slices"
	"strings"
	"testing"

	"github.com/steelyard-lb/steelyard/e2e/lab/labtest"
	"github.com/steelyard-lb/steelyard/lb/lbtest/must"
)

func (n *node) openDevice() (d *device) {
	n.t.Helper()
	n.do(func() (err error) { d, err = openDevice(slog.New(slog.DiscardHandler)); return err })
	return d
}

// routes returns the routes of our protocol.
func (n *node) routes(family string) (all []string) {
	for line := range strings.Lines(n.sh("ip %s route show proto 0x53", family)) {
		all = append(all, strings.TrimSpace(line))
	}
	slices.Sort(all)
	return all
}

func TestDevice(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	n.pod("up0")
	for _, command := range []string{
		"sysctl -qw net.ipv4.ip_forward=1 net.ipv6.conf.all.forwarding=1 net.ipv6.conf.default.disable_ipv6=1",
		"ip addr add 10.0.0.1/24 dev up0", "ip addr add fd00::1/64 dev up0 nodad",
		"ip addr add 10.0.0.2/32 dev lo",
	} {
		n.sh("%s", command)
	}
	d := n.openDevice()
	index := d.Index()
	prefixes := func(all ...string) (list []netip.Prefix) {
		for _, p := range all {
			list = append(list, netip.MustParsePrefix(p))
		}
		return list
	}
	v4, v6 := netip.MustParseAddr("10.0.0.1"), netip.MustParseAddr("fd00::1")
	services := prefixes("10.96.0.0/12", "10.96.0.0/12", "203.0.113.5/32", "fd00:96::/112")
	route := func(p []netip.Prefix, v4, v6 netip.Addr) error {
		return n.Do(func() error { return d.Route(p, v4, v6) })
	}
	want4 := []string{"10.96.0.0/12 dev sy0 scope link src 10.0.0.1", "203.0.113.5 dev sy0 scope link src 10.0.0.1"}
	want6 := []string{"fd00:96::/112 dev sy0 src fd00::1 metric 1024 pref medium"}
	both := func(t *testing.T) {
		t.Helper()
		must.Equal(t, want4, n.routes("-4"))
		must.Equal(t, want6, n.routes("-6"))
	}
	must.Do(t, route(services, v4, v6))
	both(t)

	t.Run("is set up", func(t *testing.T) {
		for _, name := range []string{deviceName, peerName} {
			l := n.link(name)
			must.Row(t, name, 1280, l.Attrs().MTU)
			shown := n.sh("ip addr show %s", name)
			must.True(t, strings.Contains(shown, "NOARP,UP") && !strings.Contains(shown, "inet"), "%s", shown)
		}
		must.Equal(t, deviceMAC.String(), n.link(deviceName).Attrs().HardwareAddr.String())
		must.Equal(t, peerMAC.String(), n.link(peerName).Attrs().HardwareAddr.String())
		must.Equal(t, "1", strings.TrimSpace(n.sh("sysctl -n net.ipv4.conf.sy0.rp_filter")))
		n.do(func() error { return d.SetMTU(1450) })
		must.Equal(t, 1450, n.link(deviceName).Attrs().MTU)
		must.Equal(t, 1450, n.link(peerName).Attrs().MTU)
		both(t)
	})
	t.Run("the kernel drops what reaches the peer", func(t *testing.T) {
		count := func() []string {
			return strings.Fields(n.sh("awk /^Ip:.[0-9]|^Ip6InRec|^Ip6OutForw/{print$4,$7,$2} " +
				"/proc/net/snmp /proc/net/snmp6"))
		}
		labtest.Until(t, "nothing reaches IP", func() error { // now and then other packets of the host do
			before, packets := count(), n.link(peerName).Attrs().Statistics.RxPackets
			n.send("10.96.0.1:53")
			n.send("[fd00:96::1]:53")
			after := count()
			must.True(t, len(before) > 3, "counters: %v", before)
			must.True(t, n.link(peerName).Attrs().Statistics.RxPackets >= packets+2, "nothing reaches the peer")
			return labtest.ErrorIf(!slices.Equal(before, after), "%v, then %v", before, after)
		})
	})
	t.Run("the program sees what leaves", func(t *testing.T) {
		n.do(func() error { return d.attach(n.program("send", slotOut)) })
		n.send("10.96.0.1:53")
		n.send("[fd00:96::1]:53")
		must.Equal(t, uint64(2), n.ran(slotOut))
		n.do(n.devices(nil).detach)
		must.True(t, strings.Contains(n.sh("tc filter show dev sy0 egress"), "sy_inside_send"), "detach removes it")
	})
	t.Run("follows sources and prefixes", func(t *testing.T) {
		n.sh("ip route add 192.0.2.0/24 dev up0")
		n.sh("ip route add 198.51.100.0/24 dev up0 proto 0x53")
		list := prefixes("10.96.0.0/12", "192.0.2.0/24", "fd00:97::/112")
		must.Fail(t, route(list, netip.MustParseAddr("10.0.0.2"), netip.Addr{}), `[fd00:97::/112] are not routed: `+
			`this node has no address of their family`)
		must.Fail(t, route(list, v4, v6), "route 192.0.2.0/24 by sy0 with source 10.0.0.1: another program has a "+
			"route to it")
		must.Equal(t, []string{"10.96.0.0/12 dev sy0 scope link src 10.0.0.1", "198.51.100.0/24 dev up0 scope link"},
			n.routes("-4"))
		must.Equal(t, []string{"fd00:97::/112 dev sy0 src fd00::1 metric 1024 pref medium"}, n.routes("-6"))
		must.Fail(t, route(list[:1], netip.MustParseAddr("10.0.0.9"), v6), "invalid argument")
		n.sh("ip route del 198.51.100.0/24")
	})
	t.Run("is created again", func(t *testing.T) {
		for _, command := range []string{"ip link del sy0", "ip link del sy1", "ip link set sy0 down",
			"ip link set sy0 address 02:00:00:00:00:09"} {
			n.sh("%s", command)
			must.Do(t, route(services, v4, v6))
			both(t)
			must.Row(t, command, index, n.link(deviceName).Attrs().Index)
			must.Row(t, command, 1450, n.link(deviceName).Attrs().MTU)
			must.Row(t, command, deviceMAC.String(), n.link(deviceName).Attrs().HardwareAddr.String())
			before := n.ran(slotOut)
			n.send("10.96.0.1:53")
			must.Row(t, command, true, n.ran(slotOut) > before)
		}
	})
	t.Run("is taken over", func(t *testing.T) {
		d = n.openDevice()
		must.Equal(t, index, d.Index())
		must.Equal(t, 1450, n.link(deviceName).Attrs().MTU)
		both(t)
	})
	t.Run("is removed", func(t *testing.T) {
		n.do(d.Remove)
		n.do(d.Remove)
		want4, want6 = nil, nil
		both(t)
		names := must.Get(n.Interfaces())(t)
		must.True(t, !slices.Contains(names, deviceName) && !slices.Contains(names, peerName), "%v", names)
	})
	t.Run("another's interface stays", func(t *testing.T) {
		n.sh("ip link add sy0 type bridge")
		foreign := "the interface sy0 is not Steelyard's"
		must.Fail(t, n.Do(func() error { _, err := openDevice(nil); return err }), foreign)
		must.Fail(t, n.Do(d.Remove), foreign)
		must.Equal(t, "bridge", n.link("sy0").Type())
	})
}
