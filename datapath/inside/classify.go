package inside

import (
	"net"
	"slices"

	"github.com/vishvananda/netlink"
)

// kind says whose packets a device carries. The programs read it from the device's entry.
type kind uint8

const (
	kindNone   kind = iota // no programs
	kindPod                // this node's side of a device that leads to pods
	kindUplink             // leads to other machines
)

func (k kind) String() string { return [...]string{"none", "pod", "uplink"}[k] }

// unserved are the types whose pods the programs do not see: their packets enter and leave by the parent interface,
// behind its tc hooks.
var unserved = []string{"ipvlan", "ipvtap", "macvlan", "macvtap"}

// silent are the types that carry no packets of other machines, or only packets that the programs see elsewhere: at a
// bridge's or VRF's ports, and at the interface that redirects to an ifb.
var silent = []string{"bridge", "vrf", "dummy", "ifb", "nlmon", "can", "vcan", "vsockmon"}

// classify returns the kind of an interface, and the index of the bridge that a pod's device is a port of, or 0.
// uplinks are the names of the configured uplinks. masters has the interfaces that have ports, by index.
func classify(l netlink.Link, uplinks []string, masters map[int]netlink.Link) (k kind, bridge int) {
	a, master := l.Attrs(), masters[l.Attrs().MasterIndex]
	switch {
	case a.Flags&net.FlagLoopback != 0, a.Name == deviceName, a.Name == peerName:
		return kindNone, 0
	case slices.Contains(uplinks, a.Name):
		return kindUplink, 0
	case leadsToPods(l):
		if master != nil && master.Type() == "bridge" {
			bridge = a.MasterIndex
		}
		return kindPod, bridge
	case slices.Contains(unserved, l.Type()), slices.Contains(silent, l.Type()):
		return kindNone, 0
	case master != nil && (master.Type() != "bridge" || slices.Contains(uplinks, master.Attrs().Name)):
		return kindNone, 0 // the master sees the packets
	}
	return kindUplink, 0
}

// leadsToPods reports whether the type of an interface is one that container runtimes and virtual machines use. The
// peer of a netkit pair is the side of a pod, so here it is this node's own interface.
func leadsToPods(l netlink.Link) bool {
	if n, ok := l.(*netlink.Netkit); ok {
		return n.IsPrimary()
	}
	return l.Type() == "veth" || l.Type() == "tuntap"
}

// isMaster reports whether the ports of an interface have no programs of their own, or are told from others by it.
func isMaster(l netlink.Link) bool {
	return l.Type() == "bridge" || l.Type() == "bond" || l.Type() == "team"
}
