package lab

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"sync"
)

// TCPEcho is a server whose connections live until a side ends them: it answers every line with its name, a space and
// that line. Its methods may be called from any goroutine.
type TCPEcho struct {
	Name string
	s    service
}

// ServeTCPEcho starts a TCPEcho that listens on addrs. It ends with the host, if not before.
func (h *Host) ServeTCPEcho(name string, addrs ...netip.AddrPort) (*TCPEcho, error) {
	e := &TCPEcho{Name: name}
	e.s = service{host: h, addrs: addrs, serve: e.serve}
	if err := e.Start(); err != nil {
		return nil, err
	}
	return e, h.own(&e.s)
}

// Start lets a stopped server listen again.
func (e *TCPEcho) Start() error { return e.s.start() }

// Stop takes the server away as a crash does: connections are reset and its ports refuse.
func (e *TCPEcho) Stop() error { return e.s.Close() }

// Connections returns how many connections are open.
func (e *TCPEcho) Connections() int { return e.s.open() }

func (e *TCPEcho) serve(l net.Listener) {
	var conns sync.WaitGroup
	defer conns.Wait()
	for {
		c, err := l.Accept()
		if err != nil {
			return
		}
		conns.Go(func() {
			defer c.Close()
			lines := bufio.NewScanner(c)
			for lines.Scan() {
				if _, err := fmt.Fprintf(c, "%s %s\n", e.Name, lines.Text()); err != nil {
					return
				}
			}
		})
	}
}

// UDPEcho answers every datagram with its name, a space and the datagram.
type UDPEcho struct {
	Name    string
	host    *Host
	addrs   []netip.AddrPort
	mu      sync.Mutex // guards sockets
	sockets []net.PacketConn
	running sync.WaitGroup
}

// ServeUDPEcho starts a UDPEcho on addrs. An answer comes from the address asked only if that is in addrs: do not
// listen on the unspecified address where a host has several. It ends with the host, if not before.
func (h *Host) ServeUDPEcho(name string, addrs ...netip.AddrPort) (*UDPEcho, error) {
	e := &UDPEcho{Name: name, host: h, addrs: addrs}
	if err := e.Start(); err != nil {
		return nil, err
	}
	return e, h.own(e)
}

// Start lets a stopped server listen again.
func (e *UDPEcho) Start() error {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.sockets != nil {
		return nil
	}
	for _, a := range e.addrs {
		c, err := e.host.ListenPacket(context.Background(), "udp", a.String())
		if err != nil {
			return err
		}
		e.sockets = append(e.sockets, c)
		e.running.Go(func() { e.answer(c) })
	}
	return nil
}

func (e *UDPEcho) answer(c net.PacketConn) {
	b := make([]byte, 64<<10)
	for {
		n, from, err := c.ReadFrom(b)
		if errors.Is(err, net.ErrClosed) {
			return
		}
		if err == nil { // else an ICMP error about an answer sent before; the next datagram may be fine
			c.WriteTo([]byte(e.Name+" "+string(b[:n])), from)
		}
	}
}

// Stop closes the sockets: the port is unreachable then.
func (e *UDPEcho) Stop() error { return e.Close() }

// Close is Stop.
func (e *UDPEcho) Close() error {
	e.mu.Lock()
	var err error
	for _, c := range e.sockets {
		if x := c.Close(); x != nil && !errors.Is(x, net.ErrClosed) {
			err = errors.Join(err, x)
		}
	}
	e.sockets = nil
	e.mu.Unlock()
	e.running.Wait()
	return err
}
