package healthd

import (
	"net"
	"net/netip"
	"syscall"

	"golang.org/x/sys/unix"

	"github.com/steelyard-lb/steelyard/lb"
)

// Way is how the packets of a check get to one server although the address they are for is a VIP, which many have.
type Way struct {
	Mark uint32     // SO_MARK
	From netip.Addr // our address
}

// target is what a check asks, and how to get there.
type target struct {
	lb.Check
	way func(lb.Check) (Way, error) // for checks with a VIP
}

// dialer returns what to connect with, and where to. A check of a server that answers
// clients itself asks for the VIP, the way clients' packets go, because that is what must work.
func (t target) dialer(network string) (*net.Dialer, netip.AddrPort, error) {
	if !t.VIP.IsValid() {
		return &net.Dialer{}, t.Target, nil
	}
	to := netip.AddrPortFrom(t.VIP, t.Target.Port())
	way, err := t.way(t.Check)
	if err != nil {
		return nil, to, err
	}
	d := &net.Dialer{LocalAddr: net.TCPAddrFromAddrPort(netip.AddrPortFrom(way.From, 0))}
	if network == "udp" {
		d.LocalAddr = net.UDPAddrFromAddrPort(netip.AddrPortFrom(way.From, 0))
	}
	d.Control = func(_, _ string, c syscall.RawConn) error {
		var failed error
		err := c.Control(func(fd uintptr) { failed = unix.SetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_MARK, int(way.Mark)) })
		if err != nil {
			return err
		}
		return failed
	}
	return d, to, nil
}
