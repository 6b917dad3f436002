package guard

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"time"
)

// listener is a listening socket, or why there is none.
type listener struct {
	socket *net.TCPListener
	err    error
}

// listenRetry is the interval at which a port that was in use is tried again.
const listenRetry = 5 * time.Second

func (l *listener) close() {
	if l.socket != nil {
		l.socket.Close()
	}
}

// relisten opens the listening sockets that are missing.
func (g *Guard) relisten(ctx context.Context) {
	g.mu.Lock()
	defer g.mu.Unlock()
	var peers []Config
	for _, p := range g.peers {
		peers = append(peers, p.wanted)
	}
	wanted := g.listenAddresses(peers)
	for at, l := range g.listen {
		if !slices.Contains(wanted, at) {
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
				g.o.Log.Error("not listening; only connecting", "address", at, "err", err)
			}
			l.err = err
			continue
		}
		l.socket, l.err = socket, nil
		g.wg.Go(func() { g.accept(ctx, socket) })
	}
}

// listenAddresses returns those of the options, or the unspecified address of each family that peers have, so that a
// node without IPv6 can have IPv4 peers.
func (g *Guard) listenAddresses(peers []Config) (list []netip.AddrPort) {
	if g.o.ListenPort < 0 {
		return nil
	}
	add := func(a netip.Addr) {
		if at := netip.AddrPortFrom(a, uint16(g.o.ListenPort)); !slices.Contains(list, at) {
			list = append(list, at)
		}
	}
	for _, a := range g.o.ListenAddresses {
		add(a)
	}
	if len(list) > 0 {
		return list
	}
	for _, r := range g.ranges {
		peers = append(peers, Config{Address: r.Prefix.Addr()})
	}
	for _, p := range peers {
		if p.Address.Is4() {
			add(netip.IPv4Unspecified())
		} else {
			add(netip.IPv6Unspecified())
		}
	}
	return list
}

// Problems returns why the guard does not listen, by address.
func (g *Guard) Problems() map[netip.AddrPort]error {
	g.mu.Lock()
	defer g.mu.Unlock()
	problems := map[netip.AddrPort]error{}
	for at, l := range g.listen {
		if l.err != nil {
			problems[at] = l.err
		}
	}
	return problems
}

// accept passes connections to their peers.
func (g *Guard) accept(ctx context.Context, l *net.TCPListener) {
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
		g.accepted(ctx, c)
	}
}

func (g *Guard) accepted(ctx context.Context, c *net.TCPConn) {
	from, local := addrOf(c.RemoteAddr()), addrOf(c.LocalAddr())
	p := g.peerOf(from)
	if p == nil && g.o.Unknown != nil && g.inRange(from) && g.o.Unknown(from) {
		p = g.peerOf(from)
	}
	if p == nil {
		g.o.Log.Debug("connection of an unknown peer closed", "peer", from)
		c.Close()
		return
	}
	cfg := p.cfg.Load()
	raw, err := c.SyscallConn()
	switch {
	case cfg.Source.IsValid() && local.WithZone("") != cfg.Source.WithZone(""):
		err = fmt.Errorf("the peer connects to %v, source is %v", local, cfg.Source)
	case err == nil:
		err = control(raw, func(fd int) error { return setOptions(fd, cfg) })
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
