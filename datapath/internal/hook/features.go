package hook

import (
	"encoding/binary"
	"fmt"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"
)

// The netdev family of generic netlink (include/uapi/linux/netdev.h, Linux 6.3).
const (
	netdevGet         = 1
	netdevIfindex     = 1
	netdevXDPFeatures = 3

	xdpFeatureXmit = 4 // NETDEV_XDP_ACT_NDO_XMIT: a frame can be redirected to the device
)

// genlHeader is struct genlmsghdr. The library sends a nonzero reserved field, which the family rejects.
type genlHeader [4]byte

func (h genlHeader) Len() int          { return len(h) }
func (h genlHeader) Serialize() []byte { return h[:] }

// xdpFeatures returns the XDP features of an interface. It fails before Linux 6.3.
func xdpFeatures(index int) (uint64, error) {
	family, err := netlink.GenlFamilyGet("netdev")
	if err != nil {
		return 0, fmt.Errorf("find the netdev family: %w", err)
	}
	req := nl.NewNetlinkRequest(int(family.ID), 0)
	req.AddData(genlHeader{netdevGet, 1})
	req.AddData(nl.NewRtAttr(netdevIfindex, nl.Uint32Attr(uint32(index))))
	answers, err := req.Execute(unix.NETLINK_GENERIC, 0)
	if err != nil {
		return 0, fmt.Errorf("request XDP features: %w", err)
	}
	for _, a := range answers {
		attrs, err := nl.ParseRouteAttr(a[nl.SizeofGenlmsg:])
		if err != nil {
			return 0, fmt.Errorf("read XDP features: %w", err)
		}
		for _, x := range attrs {
			if x.Attr.Type == netdevXDPFeatures && len(x.Value) == 8 {
				return binary.NativeEndian.Uint64(x.Value), nil
			}
		}
	}
	return 0, fmt.Errorf("the kernel returns no XDP features of interface %d", index)
}
