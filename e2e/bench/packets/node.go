package packets

import (
	"context"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/netip"
	"os"
	"slices"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/steelyard-lb/steelyard/datapath"
	"github.com/steelyard-lb/steelyard/e2e/lab"
	"github.com/steelyard-lb/steelyard/lb"
)

const uplink = "eth0"

// Addresses of a node and its neighbours. Clients are behind the router.
var (
	self4, self6     = netip.MustParseAddr("192.0.2.1"), netip.MustParseAddr("2001:db8::1")
	router4, router6 = netip.MustParseAddr("192.0.2.254"), netip.MustParseAddr("2001:db8::fe")
	macSelf          = net.HardwareAddr{2, 0, 0, 0, 0, 1} // destination of dptest's frames
	macOther         = net.HardwareAddr{2, 0, 0, 0, 0, 9}
)

// server4 and server6 return the addresses of server or node i on the link, 0 to 99.
func server4(i int) netip.Addr { return netip.AddrFrom4([4]byte{192, 0, 2, byte(100 + i)}) }
func server6(i int) netip.Addr {
	return netip.AddrFrom16([16]byte{0x20, 1, 0xd, 0xb8, 14: 1, 15: byte(i)})
}

// pod returns the address of pod i on the node.
func pod(i int) netip.Addr { return netip.AddrFrom4([4]byte{10, 244, 0, byte(i + 1)}) }

// node is a host with the datapath on one uplink. The uplink is a TAP interface, so that programs use XDP_TX as on a
// network card, but it sends nothing.
type node struct {
	host             *lab.Host
	dp               *datapath.Datapath
	index            uint32
	xdp, tcIn, tcOut *ebpf.Program
}

func (n *node) Close() error {
	for _, p := range []*ebpf.Program{n.xdp, n.tcIn, n.tcOut} {
		p.Close()
	}
	if n.dp == nil {
		return nil
	}
	return n.dp.Close()
}

// newNode creates a node for this many flows, with a TAP interface.
func newNode(l *lab.Lab, flows int, change func(*datapath.Options)) (*node, error) {
	h, err := l.Host("node")
	if err != nil {
		return nil, err
	}
	tap, err := openTap(h)
	if err != nil {
		return nil, err
	}
	if err := h.Own(tap); err != nil {
		return nil, err
	}
	if err := setMAC(h, uplink, macSelf); err != nil {
		return nil, err
	}
	if err := h.SetUp(uplink); err != nil {
		return nil, err
	}
	n := &node{host: h}
	if err := n.configure(); err != nil {
		return nil, fmt.Errorf("configure the uplink: %w", err)
	}
	return n, n.open(flows, change)
}

// open opens the datapath. Each frontend may have an eighth of the flows over UDP.
func (n *node) open(flows int, change func(*datapath.Options)) error {
	o := datapath.Options{
		Interfaces: []string{uplink}, Mode: datapath.ModeXDP, MaxFlows: flows + flows/2 + 8*flows64k,
		SNATPorts:  []datapath.PortRange{{First: 10000, Last: 65535}},
		TunnelPort: 6090, Timeouts: datapath.DefaultTimeouts,
		PinPath: datapath.DefaultPinPath, StateDir: datapath.DefaultStateDir, Log: slog.New(slog.DiscardHandler),
	}
	change(&o)
	return n.host.Do(func() (err error) {
		if n.dp, err = datapath.Open(o); err != nil {
			return err
		}
		return n.findPrograms(o.Mode)
	})
}

// configure adds the uplink's addresses, neighbours and default routes.
func (n *node) configure() (err error) {
	if n.index, err = indexOf(n.host, uplink); err != nil {
		return err
	}
	for _, p := range []netip.Prefix{netip.PrefixFrom(self4, 24), netip.PrefixFrom(self6, 64)} {
		if err := n.host.AddAddress(uplink, p); err != nil {
			return err
		}
	}
	neighbours := []netip.Addr{router4, router6}
	for i := range 100 {
		neighbours = append(neighbours, server4(i), server6(i))
	}
	if err := addNeighbours(n.host, uplink, macOther, neighbours...); err != nil {
		return err
	}
	if err := n.host.AddRoute(netip.PrefixFrom(netip.IPv4Unspecified(), 0), router4); err != nil {
		return err
	}
	return n.host.AddRoute(netip.PrefixFrom(netip.IPv6Unspecified(), 0), router6)
}

func indexOf(h *lab.Host, dev string) (index uint32, err error) {
	err = h.Do(func() error {
		nic, err := netlink.LinkByName(dev)
		if err == nil {
			index = uint32(nic.Attrs().Index)
		}
		return err
	})
	return index, err
}

func setMAC(h *lab.Host, dev string, mac net.HardwareAddr) error {
	return h.Do(func() error {
		nic, err := netlink.LinkByName(dev)
		if err != nil {
			return err
		}
		return netlink.LinkSetHardwareAddr(nic, mac)
	})
}

// addNeighbours adds permanent neighbour entries.
func addNeighbours(h *lab.Host, dev string, mac net.HardwareAddr, addrs ...netip.Addr) error {
	index, err := indexOf(h, dev)
	if err != nil {
		return err
	}
	return h.Do(func() error {
		for _, a := range addrs {
			err := netlink.NeighSet(&netlink.Neigh{LinkIndex: int(index), State: netlink.NUD_PERMANENT,
				IP: a.AsSlice(), HardwareAddr: mac})
			if err != nil {
				return err
			}
		}
		return nil
	})
}

// openTap creates the interface, which exists until the file is closed.
func openTap(h *lab.Host) (tap io.Closer, err error) {
	err = h.Do(func() error {
		fd, err := unix.Open("/dev/net/tun", unix.O_RDWR|unix.O_CLOEXEC, 0)
		if err != nil {
			return err
		}
		tap = os.NewFile(uintptr(fd), "tap")
		req, err := unix.NewIfreq(uplink)
		if err != nil {
			return err
		}
		req.SetUint16(unix.IFF_TAP | unix.IFF_NO_PI)
		return unix.IoctlIfreq(fd, unix.TUNSETIFF, req)
	})
	return tap, err
}

// findPrograms finds the programs through their hooks.
func (n *node) findPrograms(mode datapath.Mode) error {
	nic, err := netlink.LinkByName(uplink)
	if err != nil {
		return err
	}
	xdp := nic.Attrs().Xdp
	switch {
	case mode == datapath.ModeTC:
	case xdp == nil || !xdp.Attached:
		return fmt.Errorf("no XDP program on %s", uplink)
	default:
		if n.xdp, err = ebpf.NewProgramFromID(ebpf.ProgramID(xdp.ProgId)); err != nil {
			return err
		}
	}
	if n.tcIn, err = n.attached(ebpf.AttachTCXIngress); err != nil {
		return err
	}
	n.tcOut, err = n.attached(ebpf.AttachTCXEgress)
	return err
}

func (n *node) attached(where ebpf.AttachType) (*ebpf.Program, error) {
	q, err := link.QueryPrograms(link.QueryOptions{Target: int(n.index), Attach: where})
	if err != nil {
		return nil, fmt.Errorf("list the tcx programs of %s: %w", uplink, err)
	}
	if len(q.Programs) != 1 {
		return nil, fmt.Errorf("%d programs at %s of %s; want 1", len(q.Programs), where, uplink)
	}
	return ebpf.NewProgramFromID(q.Programs[0].ID)
}

// put applies these services in parts, because an Apply may keep a file open per frontend.
func (n *node) put(services ...*lb.Service) error {
	return n.host.Do(func() error {
		for part := range slices.Chunk(services, 1000) {
			var d lb.Delta
			for _, s := range part {
				d.Put = append(d.Put, lb.Build(s, nil, lb.Drains{}).Frontends...)
			}
			for f, err := range n.dp.Apply(context.Background(), d) {
				return fmt.Errorf("%s: %w", f, err)
			}
		}
		return nil
	})
}
