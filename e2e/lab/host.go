package lab

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"sync"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"
)

// Host is one simulated machine. Its methods may be called from any goroutine.
type Host struct {
	name   string
	ns     namespaces
	nl     *netlink.Handle
	anchor chan func()   // run on the thread that stays in the host and starts its processes
	ended  chan struct{} // closed when that thread must end

	mu        sync.Mutex // guards the following fields
	closed    bool
	processes map[*Process]struct{}
	closers   []io.Closer     // servers and listeners to close with the host
	routes    []netlink.Route // added by AddRoute, for PowerOn to restore
}

// sysctls are set in every host before its first link. Strict reverse-path filtering (RFC 3704) would drop packets on
// asymmetric paths. Duplicate address detection would keep an IPv6 address tentative for a second. keep_addr_on_down
// keeps a host's IPv6 addresses when PowerOff sets its links down.
var sysctls = map[string]string{
	"net.ipv4.conf.all.rp_filter":                "0",
	"net.ipv4.conf.default.rp_filter":            "0",
	"net.ipv6.conf.all.accept_dad":               "0",
	"net.ipv6.conf.default.accept_dad":           "0",
	"net.ipv6.conf.default.accept_ra":            "0",
	"net.ipv6.conf.all.keep_addr_on_down":        "1",
	"net.ipv6.conf.default.keep_addr_on_down":    "1",
	"net.ipv6.conf.default.router_solicitations": "0",
}

func newHost(name string) (*Host, error) {
	h := &Host{name: name, anchor: make(chan func()), ended: make(chan struct{}), processes: map[*Process]struct{}{}}
	made := make(chan error, 1)
	goOnThread(func() {
		var err error
		h.ns, err = newNamespaces()
		made <- err
		if err != nil {
			return
		}
		for {
			select {
			case work := <-h.anchor:
				work()
			case <-h.ended:
				return
			}
		}
	})
	if err := <-made; err != nil {
		return nil, err
	}
	if err := h.prepare(); err != nil {
		return nil, errors.Join(err, h.Close())
	}
	return h, nil
}

func (h *Host) prepare() error {
	nl, err := netlink.NewHandleAt(netns.NsHandle(h.ns.net.Fd()), unix.NETLINK_ROUTE)
	if err != nil {
		return fmt.Errorf("open netlink: %w", err)
	}
	h.nl = nl
	if err := h.Sysctl(sysctls); err != nil {
		return err
	}
	return h.SetUp("lo")
}

// Name returns the name given to Lab.Host.
func (h *Host) Name() string { return h.name }

func (h *Host) String() string { return h.name }

// Do runs f on a thread in the host's namespaces, so f creates sockets and opens files there. A goroutine that f starts
// does not run in them. Do returns f's error.
func (h *Host) Do(f func() error) error {
	return onThread(func() error {
		if err := h.ns.enter(); err != nil {
			return fmt.Errorf("enter host %s: %w", h.name, err)
		}
		return f()
	})
}

// Enter returns the start of a command line that runs a program on the host, with nsenter(1). It is valid for processes
// that see the same /proc, until the host is closed.
func (h *Host) Enter() string {
	return fmt.Sprintf("nsenter --net=/proc/%[1]d/fd/%[2]d --mount=/proc/%[1]d/fd/%[3]d", os.Getpid(), h.ns.net.Fd(),
		h.ns.mnt.Fd())
}

// Sysctl sets kernel parameters in the host's network namespace by their sysctl(8) names.
func (h *Host) Sysctl(values map[string]string) error {
	return h.Do(func() error {
		for name, value := range values {
			path := "/proc/sys/" + strings.ReplaceAll(name, ".", "/")
			if err := os.WriteFile(path, []byte(value), 0); err != nil {
				return fmt.Errorf("set %s to %s in host %s: %w", name, value, h.name, err)
			}
		}
		return nil
	})
}

// WriteFile writes a file in the host's file system, and creates its parent directories. Files below /run are private
// to the host; the rest of the file system is shared.
func (h *Host) WriteFile(path, text string, mode os.FileMode) error {
	return h.Do(func() error {
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			return err
		}
		return os.WriteFile(path, []byte(text), mode)
	})
}

// ReadFile reads a file in the host's file system.
func (h *Host) ReadFile(path string) (text string, err error) {
	err = h.Do(func() error {
		b, err := os.ReadFile(path)
		text = string(b)
		return err
	})
	return text, err
}

// Listen is like net.Listen on the host. The listener is closed with the host, if not before.
func (h *Host) Listen(ctx context.Context, network, address string) (net.Listener, error) {
	return open(h, func() (net.Listener, error) { return new(net.ListenConfig).Listen(ctx, network, address) })
}

// ListenPacket is like net.ListenPacket on the host. The socket is closed with the host, if not before.
func (h *Host) ListenPacket(ctx context.Context, network, address string) (net.PacketConn, error) {
	return open(h, func() (net.PacketConn, error) { return new(net.ListenConfig).ListenPacket(ctx, network, address) })
}

func open[C io.Closer](h *Host, f func() (C, error)) (c C, err error) {
	err = h.Do(func() error {
		c, err = f()
		return err
	})
	if err != nil {
		return c, fmt.Errorf("host %s: %w", h.name, err)
	}
	return c, h.Own(c)
}

// Dial is like net.Dial on the host. A unix socket's path is in the host's file system. address must not contain a host
// name. The caller closes the connection.
func (h *Host) Dial(ctx context.Context, network, address string) (c net.Conn, err error) {
	return h.DialFrom(ctx, netip.AddrPort{}, network, address)
}

// DialFrom is like Dial for tcp, from a local address and port; port 0 means any.
func (h *Host) DialFrom(ctx context.Context, from netip.AddrPort, network, address string) (c net.Conn, err error) {
	d := net.Dialer{KeepAlive: -1}
	if from.IsValid() {
		d.LocalAddr = net.TCPAddrFromAddrPort(from)
	}
	err = h.Do(func() error {
		c, err = d.DialContext(ctx, network, address)
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("host %s: %w", h.name, err)
	}
	return c, nil
}

// Own makes the host's Close close c.
func (h *Host) Own(c io.Closer) error {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.closed {
		return errors.Join(fmt.Errorf("host %s is closed", h.name), c.Close())
	}
	h.closers = append(h.closers, c)
	return nil
}

// Close ends the host's processes and servers, and releases its namespaces. It may be called again.
func (h *Host) Close() error {
	h.mu.Lock()
	if h.closed {
		h.mu.Unlock()
		return nil
	}
	h.closed = true
	closers := h.closers
	h.closers = nil
	h.mu.Unlock()

	err := h.stopAll()
	for _, c := range closers {
		if e := c.Close(); e != nil && !errors.Is(e, net.ErrClosed) {
			err = errors.Join(err, e)
		}
	}
	close(h.ended)
	if h.nl != nil {
		h.nl.Close()
	}
	return errors.Join(err, h.ns.close())
}
