package l2

import (
	"errors"
	"fmt"
	"net/netip"

	"github.com/mdlayher/packet"
	"golang.org/x/sys/unix"
)

// groups are an interface's multicast group memberships. The kernel reports them to switches (RFC 3810).
// net.core.optmem_max limits a socket to about 2,000 memberships, so there are as many sockets as necessary. If the
// kernel refuses a group even on a new socket, the interface receives all multicast frames, but snooping switches then
// do not learn the group.
type groups struct {
	index   int // of the interface
	sockets []int
	of      map[netip.Addr]int // socket by group
	conn    *packet.Conn
	all     bool // the interface receives all multicast frames
}

func newGroups(index int, conn *packet.Conn) *groups {
	return &groups{index: index, of: map[netip.Addr]int{}, conn: conn}
}

func (g *groups) joinGroup(group netip.Addr) error {
	for opened := false; ; opened = true {
		if opened || len(g.sockets) == 0 {
			s, err := unix.Socket(unix.AF_INET6, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
			if err != nil {
				return g.joinAll(err)
			}
			g.sockets = append(g.sockets, s)
			opened = true
		}
		s := g.sockets[len(g.sockets)-1]
		err := unix.SetsockoptIPv6Mreq(s, unix.IPPROTO_IPV6, unix.IPV6_JOIN_GROUP, g.request(group))
		full := errors.Is(err, unix.ENOBUFS) || errors.Is(err, unix.ENOMEM)
		switch {
		case err == nil:
			g.of[group] = s
			return nil
		case opened || !full:
			return g.joinAll(err)
		}
	}
}

func (g *groups) leaveGroup(group netip.Addr) error {
	s, ok := g.of[group]
	if !ok {
		return nil
	}
	delete(g.of, group)
	return unix.SetsockoptIPv6Mreq(s, unix.IPPROTO_IPV6, unix.IPV6_LEAVE_GROUP, g.request(group))
}

func (g *groups) request(group netip.Addr) *unix.IPv6Mreq {
	return &unix.IPv6Mreq{Multiaddr: group.As16(), Interface: uint32(g.index)}
}

// joinAll makes the interface receive all multicast frames, because the kernel refused a group.
func (g *groups) joinAll(refused error) error {
	if g.all {
		return nil
	}
	raw, err := g.conn.SyscallConn()
	if err != nil {
		return errors.Join(refused, err)
	}
	var set error
	if err = raw.Control(func(fd uintptr) {
		all := unix.PacketMreq{Ifindex: int32(g.index), Type: unix.PACKET_MR_ALLMULTI}
		set = unix.SetsockoptPacketMreq(int(fd), unix.SOL_PACKET, unix.PACKET_ADD_MEMBERSHIP, &all)
	}); err == nil {
		err = set
	}
	if err != nil {
		return errors.Join(refused, err)
	}
	g.all = true
	return fmt.Errorf("%w; the interface now receives all multicast frames", refused)
}

func (g *groups) Close() (err error) {
	for _, s := range g.sockets {
		err = errors.Join(err, unix.Close(s))
	}
	g.sockets = nil
	return err
}
