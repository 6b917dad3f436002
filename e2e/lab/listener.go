package lab

import (
	"context"
	"errors"
	"net"
	"net/netip"
	"sync"
)

// service is a set of TCP listeners that can be taken away as a crash takes them: listeners closed, connections reset.
// Its methods may be called from any goroutine.
type service struct {
	host  *Host
	addrs []netip.AddrPort
	serve func(net.Listener) // takes connections from a listener until that is closed

	mu        sync.Mutex // guards what follows
	listeners []net.Listener
	conns     map[*trackedConn]struct{}
	running   sync.WaitGroup
}

// start listens and serves. It is no error when the service runs.
func (s *service) start() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.listeners != nil {
		return nil
	}
	s.conns = map[*trackedConn]struct{}{}
	for _, a := range s.addrs {
		l, err := s.host.Listen(context.Background(), "tcp", a.String())
		if err != nil {
			for _, opened := range s.listeners {
				err = errors.Join(err, opened.Close())
			}
			s.listeners = nil
			return err
		}
		s.listeners = append(s.listeners, l)
	}
	for _, l := range s.listeners {
		s.running.Go(func() { s.serve(trackingListener{l, s}) })
	}
	return nil
}

// Close stops listening, resets every connection, and waits until nobody serves any more.
func (s *service) Close() error {
	s.mu.Lock()
	var err error
	for _, l := range s.listeners {
		if e := l.Close(); e != nil && !errors.Is(e, net.ErrClosed) {
			err = errors.Join(err, e)
		}
	}
	conns := s.conns
	s.listeners, s.conns = nil, nil
	s.mu.Unlock()
	for c := range conns {
		c.SetLinger(0) // RST instead of FIN
		c.TCPConn.Close()
	}
	s.running.Wait()
	return err
}

// open is how many connections there are.
func (s *service) open() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return len(s.conns)
}

type trackingListener struct {
	net.Listener
	s *service
}

func (l trackingListener) Accept() (net.Conn, error) {
	c, err := l.Listener.Accept()
	if err != nil {
		return nil, err
	}
	t := &trackedConn{TCPConn: c.(*net.TCPConn), s: l.s}
	l.s.mu.Lock()
	defer l.s.mu.Unlock()
	if l.s.conns == nil { // closed meanwhile
		t.SetLinger(0)
		t.TCPConn.Close()
		return nil, net.ErrClosed
	}
	l.s.conns[t] = struct{}{}
	return t, nil
}

type trackedConn struct {
	*net.TCPConn
	s *service
}

func (c *trackedConn) Close() error {
	c.s.mu.Lock()
	delete(c.s.conns, c)
	c.s.mu.Unlock()
	return c.TCPConn.Close()
}
