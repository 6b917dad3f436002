package healthd

import (
	"context"
	"errors"
	"log/slog"
	"net"
	"net/netip"
	"slices"
	"strings"
	"sync/atomic"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/steelyard-lb/steelyard/lb"
)

// Way has the socket options that direct packets for a VIP to one of the servers that have the VIP.
type Way struct {
	Mark uint32     // SO_MARK
	From netip.Addr // source address
}

// target is the destination of a check and the path to it.
type target struct {
	lb.Check
	way func(lb.Check) (Way, error) // for checks with a VIP
	log *slog.Logger
}

// secondary reports whether the target's port is not the first one that this type of check can probe. Such a port may
// use another protocol.
func (t target) secondary() bool { return t.Key.Port != lb.Port{} && t.Key.Port != t.Spec.ServicePort }

// ownAddress helps to explain timeouts at the VIP: after half the timeout it connects to the server's own address over
// TCP. The returned function stops this, and reports whether the server has responded.
func ownAddress(ctx context.Context, c lb.Check) (answers func() bool) {
	others := []lb.CheckType{lb.CheckExec, lb.CheckNodePort, lb.CheckEcho}
	if !c.VIP.IsValid() || slices.Contains(others, c.Spec.Type) {
		return func() bool { return false }
	}
	var answered atomic.Bool
	later := time.AfterFunc(c.Spec.Timeout/2, func() {
		conn, err := new(net.Dialer).DialContext(ctx, "tcp", c.Target.String())
		if err == nil {
			conn.Close()
		}
		answered.Store(err == nil || errors.Is(err, syscall.ECONNREFUSED))
	})
	return func() bool {
		later.Stop()
		return answered.Load()
	}
}

// dialer returns a dialer and the address to dial. A server that replies to clients directly (dsr, tunnel) is probed at
// the VIP over the path of clients' packets, because that path has to work.
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
	} else if strings.HasPrefix(network, "ip") {
		d.LocalAddr = &net.IPAddr{IP: way.From.AsSlice()}
	}
	d.Control = func(_, _ string, c syscall.RawConn) error {
		var failed error
		err := c.Control(func(fd uintptr) {
			failed = unix.SetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_MARK, int(way.Mark))
		})
		if err != nil {
			return err
		}
		return failed
	}
	return d, to, nil
}
