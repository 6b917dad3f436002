package traffic

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"sync"

	"github.com/steelyard-lb/steelyard/e2e/lab"
)

// TCPEcho is a server for long-lived connections. It responds to every line with its name, a space and that line, and
// closes a connection only after the client does. Its methods may be called from any goroutine.
type TCPEcho struct {
	Name string
	l    listeners
}

// ServeTCPEcho starts a TCPEcho on h that listens on addrs. It ends with the host, if not before.
func ServeTCPEcho(h *lab.Host, name string, addrs ...netip.AddrPort) (*TCPEcho, error) {
	e := &TCPEcho{Name: name}
	e.l = listeners{host: h, addrs: addrs, serve: e.serve}
	if err := e.Start(); err != nil {
		return nil, err
	}
	return e, h.Own(&e.l)
}

// Start makes a stopped server listen again.
func (e *TCPEcho) Start() error { return e.l.start() }

// Stop simulates a crash: connections are reset, and the ports refuse new ones.
func (e *TCPEcho) Stop() error { return e.l.Close() }

// Connections returns the number of open connections.
func (e *TCPEcho) Connections() int { return e.l.open() }

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

// UDPEcho responds to every datagram with its name, a space and the datagram.
type UDPEcho struct {
	Name    string
	host    *lab.Host
	addrs   []netip.AddrPort
	mu      sync.Mutex // guards sockets
	sockets []net.PacketConn
	running sync.WaitGroup
}

// ServeUDPEcho starts a UDPEcho on h at addrs. A response's source equals the request's destination only if that is in
// addrs, so do not listen on the unspecified address of a host with several addresses. It ends with the host, if not
// before.
func ServeUDPEcho(h *lab.Host, name string, addrs ...netip.AddrPort) (*UDPEcho, error) {
	e := &UDPEcho{Name: name, host: h, addrs: addrs}
	if err := e.Start(); err != nil {
		return nil, err
	}
	return e, h.Own(e)
}

// Start makes a stopped server listen again.
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
		if err == nil { // an error comes from ICMP, about an earlier response
			c.WriteTo([]byte(e.Name+" "+string(b[:n])), from)
		}
	}
}

// Stop closes the sockets, so the port becomes unreachable.
func (e *UDPEcho) Stop() error { return e.Close() }

// Close is the same as Stop.
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
