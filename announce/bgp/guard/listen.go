package guard

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"time"

	"github.com/vishvananda/netlink"
)

// Endpoint is an address where peers may connect. Device is set only for VRFs and interfaces in a VRF.
type Endpoint struct {
	netip.AddrPort
	Device string
}

// listener is a listening socket, or the error that prevented it.
type listener struct {
	socket *net.TCPListener
	index  int // of the socket's device, or 0
	err    error
}

// listenRetry is the time between attempts to listen on a port that is in use.
const listenRetry = 5 * time.Second

func (l *listener) close() {
	if l.socket != nil {
		l.socket.Close()
	}
}

// relisten opens missing listening sockets, and closes those no longer wanted.
func (g *Guard) relisten(ctx context.Context) {
	g.mu.Lock()
	defer g.mu.Unlock()
	var peers []Config
	for _, p := range g.peers {
		peers = append(peers, p.wanted)
	}
	g.own = ownSockets(peers, g.ranges)
	wanted := g.endpoints(peers)
	for at, l := range g.listen {
		// A device that was deleted and created again has a new index, and the old socket receives nothing.
		if !slices.Contains(wanted, at) || l.socket != nil && l.index != g.own[at.Device] {
			l.close()
			delete(g.listen, at)
		}
	}
	for _, at := range wanted {
		l := g.listen[at]
		if l == nil {
			l = &listener{}
			g.listen[at] = l
		}
		if l.socket != nil || ctx.Err() != nil {
			continue
		}
		socket, err := listen(ctx, at, peers, g.ranges)
		if err != nil {
			if l.err == nil {
				g.o.Log.Error("not listening; the agent only connects to peers", "address", at, "device", at.Device,
					"err", err)
			}
			l.err = err
			continue
		}
		l.socket, l.index, l.err = socket, g.own[at.Device], nil
		g.wg.Go(func() { g.accept(ctx, socket, at.Device) })
	}
}

// endpoints returns the addresses in the options, or the unspecified address of each family that peers have, so that a
// node without IPv6 can have IPv4 peers. Devices with their own sockets have the same endpoints. g.mu is held.
func (g *Guard) endpoints(peers []Config) (list []Endpoint) {
	if g.o.ListenPort < 0 {
		return nil
	}
	add := func(a netip.Addr, device string) {
		at := Endpoint{netip.AddrPortFrom(a, uint16(g.o.ListenPort)), g.socketOf(device)}
		if !slices.Contains(list, at) {
			list = append(list, at)
		}
	}
	for _, a := range g.o.ListenAddresses {
		add(a, "")
	}
	for _, r := range g.ranges {
		peers = append(peers, Config{Address: r.Prefix.Addr(), Device: r.Device})
	}
	for _, p := range peers {
		for _, a := range g.o.ListenAddresses {
			add(a, p.Device)
		}
		switch {
		case len(g.o.ListenAddresses) > 0:
		case p.Address.Is4():
			add(netip.IPv4Unspecified(), p.Device)
		default:
			add(netip.IPv6Unspecified(), p.Device)
		}
	}
	return list
}

// ownSockets returns the indexes of peers' devices that need their own listening sockets, because sockets without a
// device receive nothing from a VRF (net.ipv4.tcp_l3mdev_accept). A missing device has index 0. Connections on other
// devices arrive on the sockets without a device and are then bound to their device.
func ownSockets(peers []Config, ranges []Range) map[string]int {
	own := map[string]int{}
	add := func(device string) {
		if _, known := own[device]; known || device == "" {
			return
		}
		link, err := netlink.LinkByName(device)
		if err != nil {
			own[device] = 0
		} else if slave := link.Attrs().Slave; link.Type() == "vrf" || slave != nil && slave.SlaveType() == "vrf" {
			own[device] = link.Attrs().Index
		}
	}
	for i := range peers {
		add(peers[i].Device)
	}
	for _, r := range ranges {
		add(r.Device)
	}
	return own
}

// socketOf returns device if it has its own listening sockets, or "". g.mu is held.
func (g *Guard) socketOf(device string) string {
	if _, ok := g.own[device]; ok {
		return device
	}
	return ""
}

// Problems returns the errors that prevent listening, by endpoint.
func (g *Guard) Problems() map[Endpoint]error {
	g.mu.Lock()
	defer g.mu.Unlock()
	problems := map[Endpoint]error{}
	for at, l := range g.listen {
		if l.err != nil {
			problems[at] = l.err
		}
	}
	return problems
}

// accept passes connections to their peers. The socket is bound to device unless it is empty.
func (g *Guard) accept(ctx context.Context, l *net.TCPListener, device string) {
	for {
		c, err := l.AcceptTCP()
		switch {
		case errors.Is(err, net.ErrClosed) || ctx.Err() != nil:
			if c != nil {
				c.Close()
			}
			return
		case err != nil: // such as too many open files
			select {
			case <-ctx.Done():
			case <-time.After(100 * time.Millisecond):
			}
			continue
		}
		g.accepted(ctx, c, device)
	}
}

func (g *Guard) accepted(ctx context.Context, c *net.TCPConn, device string) {
	from, local := addrOf(c.RemoteAddr()), addrOf(c.LocalAddr())
	p := g.peerOf(from)
	if p == nil && g.o.Unknown != nil && g.inRange(from, device) && g.o.Unknown(from) {
		p = g.peerOf(from)
	}
	if p == nil {
		g.o.Log.Debug("connection from an unknown peer closed", "peer", from)
		c.Close()
		return
	}
	cfg := p.cfg.Load()
	raw, err := c.SyscallConn()
	g.mu.Lock()
	wanted := g.socketOf(cfg.Device)
	g.mu.Unlock()
	switch {
	case wanted != device && device == "":
		err = fmt.Errorf("the peer does not connect through device %s", wanted)
	case wanted != device:
		err = fmt.Errorf("the peer connects through %s, which is not its device", device)
	case cfg.Source.IsValid() && local.WithZone("") != cfg.Source.WithZone(""):
		err = fmt.Errorf("the peer connects to %v, but source is %v", local, cfg.Source)
	case err == nil:
		err = control(raw, func(fd int) error {
			if cfg.Device != "" && device == "" {
				if err := checkDevice(fd, from.Is4(), cfg.Device); err != nil {
					return err
				}
			}
			return setOptions(fd, cfg)
		})
	}
	if err != nil {
		c.Close()
		g.o.Event(Event{Peer: from, Err: err})
		return
	}
	select {
	case p.accepted <- c:
	case <-p.done:
		c.Close()
	case <-ctx.Done():
		c.Close()
	}
}
