package l2

import (
	"bytes"
	"net"
	"net/netip"

	"github.com/mdlayher/arp"
	"github.com/mdlayher/ethernet"
	"github.com/mdlayher/ndp"
	"golang.org/x/net/ipv6"
)

// system has the interfaces and the sockets. Tests replace it.
type system struct {
	byName  func(name string) (*net.Interface, error)
	openARP func(ifi *net.Interface) (arpConn, error)
	openNDP func(ifi *net.Interface) (*ndpSocket, error)
}

var kernel = system{
	byName:  net.InterfaceByName,
	openARP: func(ifi *net.Interface) (arpConn, error) { return arp.Dial(ifi) },
	openNDP: openNDP,
}

// arpConn is an *arp.Client.
type arpConn interface {
	Read() (*arp.Packet, *ethernet.Frame, error)
	Reply(request *arp.Packet, mac net.HardwareAddr, ip netip.Addr) error
	WriteTo(p *arp.Packet, to net.HardwareAddr) error
	Close() error
}

// ndpConn is an *ndp.Conn.
type ndpConn interface {
	WriteTo(m ndp.Message, cm *ipv6.ControlMessage, to netip.Addr) error
	JoinGroup(group netip.Addr) error
	LeaveGroup(group netip.Addr) error
	Close() error
}

// usable reports whether the sockets of an interface still work: it is up, and not another one of the same name.
func usable(was, now *net.Interface) bool {
	same := now.Index == was.Index && bytes.Equal(now.HardwareAddr, was.HardwareAddr)
	return same && now.Flags&net.FlagUp != 0
}
