package healthd

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"sync"
)

// listenOn listens on a port of each of this node's addresses within these prefixes. Without prefixes it listens on
// every address, including future ones.
func listenOn(within []netip.Prefix, port uint16) (net.Listener, error) {
	if len(within) == 0 {
		return net.Listen("tcp", fmt.Sprintf(":%d", port)) // both families
	}
	own, err := net.InterfaceAddrs()
	if err != nil {
		return nil, err
	}
	j := &joined{accepted: make(chan accepted), closed: make(chan struct{})}
	for _, a := range own {
		p, err := netip.ParsePrefix(a.String())
		addr := p.Addr().Unmap()
		if err != nil || !slices.ContainsFunc(within, func(w netip.Prefix) bool { return w.Contains(addr) }) {
			continue
		}
		l, err := net.Listen("tcp", netip.AddrPortFrom(addr, port).String())
		if err != nil {
			j.Close()
			return nil, err
		}
		j.all = append(j.all, l)
	}
	if len(j.all) == 0 {
		return nil, fmt.Errorf("this node has no address in %v", within)
	}
	for _, l := range j.all {
		go j.accept(l)
	}
	return j, nil
}

// joined is a net.Listener that accepts from several listeners.
type joined struct {
	all      []net.Listener
	accepted chan accepted
	once     sync.Once
	closed   chan struct{}
}

type accepted struct {
	net.Conn
	err error
}

func (j *joined) accept(l net.Listener) {
	for {
		c, err := l.Accept()
		if errors.Is(err, net.ErrClosed) {
			return
		}
		select {
		case j.accepted <- accepted{c, err}:
		case <-j.closed:
			if err == nil {
				c.Close()
			}
			return
		}
	}
}

func (j *joined) Accept() (net.Conn, error) {
	select {
	case a := <-j.accepted:
		return a.Conn, a.err
	case <-j.closed:
		return nil, net.ErrClosed
	}
}

// Addr returns the first listener's address.
func (j *joined) Addr() net.Addr { return j.all[0].Addr() }

func (j *joined) Close() (err error) {
	j.once.Do(func() {
		close(j.closed)
		for _, l := range j.all {
			err = errors.Join(err, l.Close())
		}
	})
	return err
}
