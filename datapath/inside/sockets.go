package inside

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"time"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"
	"golang.org/x/sys/unix"

	"github.com/steelyard-lb/steelyard/datapath/inside/internal/prog"
	"github.com/steelyard-lb/steelyard/datapath/internal/hook"
	"github.com/steelyard-lb/steelyard/lb"
)

// attachSockets attaches the programs for system calls to the cgroup of all processes, or replaces those of an earlier
// agent. Their links are pinned in dir. It reports whether it has changed anything.
func attachSockets(o *prog.Objects, dir string) (changed bool, err error) {
	cgroup, id, err := hook.Cgroup()
	if err != nil {
		return false, err
	}
	for _, s := range o.Sockets() {
		pin := filepath.Join(dir, "link_"+s.Name)
		l, err := link.LoadPinnedLink(pin, nil)
		if err == nil {
			var updated bool
			updated, err = update(l, s.Program, id)
			changed = changed || updated
			l.Close()
		}
		if err == nil {
			continue
		}
		changed = true
		if err := os.Remove(pin); err != nil && !errors.Is(err, os.ErrNotExist) {
			return changed, fmt.Errorf("attach %s: %w", s.Name, err)
		}
		l, err = link.AttachCgroup(link.CgroupOptions{Path: cgroup, Attach: s.At, Program: s.Program})
		if err != nil {
			return changed, fmt.Errorf("attach %s to %s: %w", s.Name, cgroup, err)
		}
		err = l.Pin(pin)
		l.Close()
		if err != nil {
			return changed, fmt.Errorf("pin %s: %w", s.Name, err)
		}
	}
	return changed, nil
}

// update makes a link run a program, unless it does. It fails for a link to another cgroup, or to none.
func update(l link.Link, p *ebpf.Program, cgroup int) (changed bool, err error) {
	info, err := l.Info()
	if err != nil {
		return false, err
	}
	if at := info.Cgroup(); at == nil || at.CgroupId != uint64(cgroup) {
		return false, errors.New("the link is not to the cgroup of all processes")
	}
	if mine, err := p.Info(); err == nil {
		if id, ok := mine.ID(); ok && id == info.Program {
			return false, nil
		}
	}
	return true, l.Update(p)
}

// probeAt is where verifySockets connects to: a port that is hardly used (tcpmux), at an address of loopback, so that
// no packet leaves the node.
var probeAt = netip.MustParseAddrPort("127.83.121.1:1")

// verifySockets returns an error unless connections of this process are translated. That the programs are attached does
// not prove it: a container's mount may show another cgroup. The caller holds i.mu.
func (i *Inside) verifySockets() (err error) {
	l, err := net.ListenTCP("tcp4", net.TCPAddrFromAddrPort(netip.AddrPortFrom(netip.MustParseAddr("127.0.0.1"), 0)))
	if err != nil {
		return err
	}
	defer l.Close()
	at, endpoint := toEndpoint(probeAt), prog.EndpointKey{} // no other list has the id 0
	service := prog.ServiceKey{Addr: at.Addr, Port: at.Port, Proto: uint8(lb.TCP), Scope: prog.Inside}
	defer func() {
		err = errors.Join(err, ignoreMissing(i.objects.Addrs.Delete(at.Addr)),
			ignoreMissing(i.objects.Services.Delete(service)), ignoreMissing(i.objects.Endpoints.Delete(endpoint)))
	}()
	err = errors.Join(i.objects.Endpoints.Put(endpoint, toEndpoint(l.Addr().(*net.TCPAddr).AddrPort())),
		i.objects.Services.Put(service, prog.Service{Endpoints: 1}),
		i.objects.Addrs.Put(at.Addr, uint32(prog.Shared)))
	if err != nil {
		return err
	}
	for _, to := range []unix.Sockaddr{
		&unix.SockaddrInet4{Addr: probeAt.Addr().As4(), Port: int(probeAt.Port())},
		&unix.SockaddrInet6{Addr: probeAt.Addr().As16(), Port: int(probeAt.Port())},
	} {
		if err := verifyConnect(l, to); err != nil {
			return fmt.Errorf("programs are attached, but a connection of this process was not translated: %w", err)
		}
	}
	return nil
}

// verifyConnect returns an error unless a connection to an address arrives at l, and still has that address as its
// peer.
func verifyConnect(l *net.TCPListener, to unix.Sockaddr) error {
	family := unix.AF_INET
	if _, is6 := to.(*unix.SockaddrInet6); is6 {
		family = unix.AF_INET6
	}
	fd, err := unix.Socket(family, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, unix.IPPROTO_TCP)
	if family == unix.AF_INET6 && errors.Is(err, unix.EAFNOSUPPORT) {
		return nil
	}
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	if family == unix.AF_INET6 { // net.ipv6.bindv6only may be set
		if err := unix.SetsockoptInt(fd, unix.IPPROTO_IPV6, unix.IPV6_V6ONLY, 0); err != nil {
			return err
		}
	}
	if err := unix.SetsockoptTimeval(fd, unix.SOL_SOCKET, unix.SO_SNDTIMEO, &unix.Timeval{Sec: 1}); err != nil {
		return err
	}
	if err := errors.Join(unix.Connect(fd, to), l.SetDeadline(time.Now().Add(time.Second))); err != nil {
		return err
	}
	c, err := l.Accept()
	if err != nil {
		return err
	}
	c.Close()
	peer, err := unix.Getpeername(fd)
	if err != nil {
		return err
	}
	var from netip.AddrPort
	switch peer := peer.(type) {
	case *unix.SockaddrInet4:
		from = netip.AddrPortFrom(netip.AddrFrom4(peer.Addr), uint16(peer.Port))
	case *unix.SockaddrInet6:
		from = netip.AddrPortFrom(netip.AddrFrom16(peer.Addr).Unmap(), uint16(peer.Port))
	}
	if from != probeAt {
		return fmt.Errorf("getpeername(2) returns %s instead of %s", from, probeAt)
	}
	return nil
}
