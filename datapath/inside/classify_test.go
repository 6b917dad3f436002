package inside

import (
	"net"
	"testing"

	"github.com/vishvananda/netlink"

	"github.com/steelyard-lb/steelyard/lb/lbtest/must"
)

func TestClassify(t *testing.T) {
	named := func(name string) netlink.LinkAttrs { return netlink.LinkAttrs{Index: 9, Name: name} }
	port := func(name string, of int) netlink.LinkAttrs {
		return netlink.LinkAttrs{Index: 9, Name: name, MasterIndex: of}
	}
	other := func(name, kind string) netlink.Link {
		return &netlink.GenericLink{LinkAttrs: named(name), LinkType: kind}
	}
	masters := map[int]netlink.Link{
		1: &netlink.Bridge{LinkAttrs: netlink.LinkAttrs{Index: 1, Name: "cni0"}},
		2: &netlink.Bridge{LinkAttrs: netlink.LinkAttrs{Index: 2, Name: "br0"}},
		3: &netlink.Bond{LinkAttrs: netlink.LinkAttrs{Index: 3, Name: "bond0"}},
	}
	uplinks := []string{"br0", "up0", "shim0"}
	loopback := named("lo")
	loopback.Flags = net.FlagLoopback
	for _, row := range []struct {
		link   netlink.Link
		kind   kind
		bridge int
	}{
		{&netlink.Device{LinkAttrs: loopback}, kindNone, 0},
		{&netlink.Device{LinkAttrs: named("eth0")}, kindUplink, 0},
		{&netlink.Device{LinkAttrs: port("eth0", 1)}, kindUplink, 0}, // of a bridge that is no uplink
		{&netlink.Device{LinkAttrs: port("eth0", 2)}, kindNone, 0},
		{&netlink.Device{LinkAttrs: port("eth0", 3)}, kindNone, 0},
		{&netlink.Device{LinkAttrs: port("eth0", 8)}, kindUplink, 0}, // the master is unknown, such as ovs-system
		{&netlink.Bond{LinkAttrs: named("bond0")}, kindUplink, 0},
		{&netlink.Bond{LinkAttrs: port("bond0", 2)}, kindNone, 0},
		{&netlink.Vlan{LinkAttrs: named("eth0.5")}, kindUplink, 0},
		{&netlink.Vxlan{LinkAttrs: named("flannel.1")}, kindUplink, 0},
		{&netlink.Geneve{LinkAttrs: named("genev_sys_6081")}, kindUplink, 0},
		{&netlink.Wireguard{LinkAttrs: named("wg0")}, kindUplink, 0},
		{&netlink.Iptun{LinkAttrs: named("tunl0")}, kindUplink, 0},
		{other("antrea-gw0", "openvswitch"), kindUplink, 0},
		{&netlink.Veth{LinkAttrs: named("cali1")}, kindPod, 0},
		{&netlink.Veth{LinkAttrs: port("veth1", 1)}, kindPod, 1},
		{&netlink.Veth{LinkAttrs: port("veth1", 2)}, kindPod, 2},
		{&netlink.Veth{LinkAttrs: port("veth1", 3)}, kindPod, 0},
		{&netlink.Veth{LinkAttrs: named("up0")}, kindUplink, 0},
		{&netlink.Veth{LinkAttrs: port("up0", 1)}, kindUplink, 0},
		{&netlink.Veth{LinkAttrs: named("sy0")}, kindNone, 0},
		{&netlink.Veth{LinkAttrs: named("sy1")}, kindNone, 0},
		{&netlink.Tuntap{LinkAttrs: port("tap0", 1)}, kindPod, 1},
		{&netlink.Netkit{LinkAttrs: named("eth0")}, kindUplink, 0}, // no primary: this node is itself a pod
		{&netlink.Bridge{LinkAttrs: named("cni0")}, kindNone, 0},
		{&netlink.Bridge{LinkAttrs: named("br0")}, kindUplink, 0},
		{&netlink.Dummy{LinkAttrs: named("nodelocaldns")}, kindNone, 0},
		{&netlink.Ifb{LinkAttrs: named("ifb0")}, kindNone, 0},
		{&netlink.Vrf{LinkAttrs: named("vrf0")}, kindNone, 0},
		{&netlink.IPVlan{LinkAttrs: named("ipvl0")}, kindNone, 0},
		{&netlink.Macvlan{LinkAttrs: named("mac0")}, kindNone, 0},
		{&netlink.Macvlan{LinkAttrs: named("shim0")}, kindUplink, 0},
	} {
		k, bridge := classify(row.link, uplinks, masters)
		must.Row(t, row.link.Type()+" "+row.link.Attrs().Name, row.kind, k)
		must.Row(t, row.link.Type()+" "+row.link.Attrs().Name, row.bridge, bridge)
	}
}
