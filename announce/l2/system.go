package l2

import (
	"bytes"
	"net"
	"net/netip"

	"github.com/mdlayher/arp"
	"github.com/mdlayher/ndp"
)

// system gives access to interfaces and sockets. Tests replace it.
type system struct {
	byName     func(name string) (*net.Interface, error)
	byIndex    func(index int) (*net.Interface, error)
	openARP    func(ifi *net.Interface) (arpConn, error)
	openNDP    func(ifi *net.Interface) (*ndpSocket, error)
	neighbours func(index int) []knownHost
}

var kernel = system{
	byName:  net.InterfaceByName,
	byIndex: net.InterfaceByIndex,
	openARP: openARP,
	openNDP: openNDP,

	neighbours: neighboursOf,
}

type arpConn interface {
	Read() (*arp.Packet, error)
	WriteTo(p *arp.Packet, to net.HardwareAddr) error
	Close() error
}

type ndpConn interface {
	send(m ndp.Message, from, to netip.Addr, mac net.HardwareAddr) error
	joinGroup(group netip.Addr) error
	leaveGroup(group netip.Addr) error
	Close() error
}

// up are the flags of an interface that is up and has a carrier.
const up = net.FlagUp | net.FlagRunning

// usable reports whether an interface's sockets still work: it is up, and no other interface has replaced it.
func usable(was, now *net.Interface) bool {
	same := now.Index == was.Index && bytes.Equal(now.HardwareAddr, was.HardwareAddr)
	return same && now.Flags&up == up
}
