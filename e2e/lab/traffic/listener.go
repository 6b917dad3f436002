package traffic

import (
	"context"
	"errors"
	"net"
	"net/netip"
	"sync"

	"github.com/steelyard-lb/steelyard/e2e/lab"
)

// listeners is a set of TCP listeners whose Close simulates a crash: listeners closed, connections reset. Its methods
// may be called from any goroutine.
type listeners struct {
	host  *lab.Host
	addrs []netip.AddrPort
	serve func(net.Listener) // accepts connections until the listener is closed

	mu      sync.Mutex // guards the following fields
	sockets []net.Listener
	conns   map[*trackedConn]struct{}
	running sync.WaitGroup
}

// start listens and serves. It does nothing if it is already listening.
func (s *listeners) start() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.sockets != nil {
		return nil
	}
	s.conns = map[*trackedConn]struct{}{}
	for _, a := range s.addrs {
		l, err := s.host.Listen(context.Background(), "tcp", a.String())
		if err != nil {
			for _, opened := range s.sockets {
				err = errors.Join(err, opened.Close())
			}
			s.sockets = nil
			return err
		}
		s.sockets = append(s.sockets, l)
	}
	for _, l := range s.sockets {
		s.running.Go(func() { s.serve(trackingListener{l, s}) })
	}
	return nil
}

// Close stops listening, resets every connection, and waits until all serve functions have returned.
func (s *listeners) Close() error {
	s.mu.Lock()
	var err error
	for _, l := range s.sockets {
		if e := l.Close(); e != nil && !errors.Is(e, net.ErrClosed) {
			err = errors.Join(err, e)
		}
	}
	conns := s.conns
	s.sockets, s.conns = nil, nil
	s.mu.Unlock()
	for c := range conns {
		c.SetLinger(0) // RST instead of FIN
		c.TCPConn.Close()
	}
	s.running.Wait()
	return err
}

// open returns the number of open connections.
func (s *listeners) open() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return len(s.conns)
}

type trackingListener struct {
	net.Listener
	s *listeners
}

func (l trackingListener) Accept() (net.Conn, error) {
	c, err := l.Listener.Accept()
	if err != nil {
		return nil, err
	}
	t := &trackedConn{TCPConn: c.(*net.TCPConn), s: l.s}
	l.s.mu.Lock()
	defer l.s.mu.Unlock()
	if l.s.conns == nil { // Close was called in the meantime
		t.SetLinger(0)
		t.TCPConn.Close()
		return nil, net.ErrClosed
	}
	l.s.conns[t] = struct{}{}
	return t, nil
}

type trackedConn struct {
	*net.TCPConn
	s *listeners
}

func (c *trackedConn) Close() error {
	c.s.mu.Lock()
	delete(c.s.conns, c)
	c.s.mu.Unlock()
	return c.TCPConn.Close()
}
