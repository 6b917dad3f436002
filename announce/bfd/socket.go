package bfd

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"net/netip"
	"strconv"

	"golang.org/x/sys/unix"
)

const (
	portSingleHop = 3784 // RFC 5881, section 4
	portMultihop  = 4784 // RFC 5883, section 5
	maxTTL        = 255
	trafficClass  = 0xc0 // CS6, network control
	maxDrain      = 256  // packets in one step: a flood must not keep it from sending
)

// listener is a socket for receiving.
type listener struct {
	fd       int
	multihop bool
}

// listen opens the sockets for both families and both kinds of session. With an error, it returns those that are open.
func listen() (open []listener, err error) {
	for _, multihop := range []bool{false, true} {
		for _, family := range []int{unix.AF_INET, unix.AF_INET6} {
			port := portSingleHop
			if multihop {
				port = portMultihop
			}
			fd, err := bound(family, netip.Addr{}, port)
			if errors.Is(err, unix.EAFNOSUPPORT) {
				continue
			}
			if err != nil {
				return open, fmt.Errorf("bfd on UDP port %d: %w", port, err)
			}
			open = append(open, listener{fd, multihop})
		}
	}
	return open, nil
}

// bound returns a socket that is bound to an address, or to all of the family, and reports the TTL of what it receives.
func bound(family int, addr netip.Addr, port int) (fd int, err error) {
	fd, err = unix.Socket(family, unix.SOCK_DGRAM|unix.SOCK_NONBLOCK|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return -1, err
	}
	options := []struct{ level, name, value int }{
		{unix.IPPROTO_IP, unix.IP_RECVTTL, 1},
		{unix.IPPROTO_IP, unix.IP_TTL, maxTTL},
		{unix.IPPROTO_IP, unix.IP_TOS, trafficClass},
	}
	if family == unix.AF_INET6 {
		options = []struct{ level, name, value int }{
			{unix.IPPROTO_IPV6, unix.IPV6_V6ONLY, 1},
			{unix.IPPROTO_IPV6, unix.IPV6_RECVHOPLIMIT, 1},
			{unix.IPPROTO_IPV6, unix.IPV6_UNICAST_HOPS, maxTTL},
			{unix.IPPROTO_IPV6, unix.IPV6_TCLASS, trafficClass},
		}
	}
	for _, o := range options {
		if err == nil {
			err = unix.SetsockoptInt(fd, o.level, o.name, o.value)
		}
	}
	if err == nil {
		err = unix.Bind(fd, sockaddr(family, addr, port))
	}
	if err != nil {
		_ = unix.Close(fd)
		return -1, err
	}
	return fd, nil
}

// sockaddr is that of all addresses of the family when addr is zero.
func sockaddr(family int, addr netip.Addr, port int) unix.Sockaddr {
	if family == unix.AF_INET {
		sa := &unix.SockaddrInet4{Port: port}
		if addr.IsValid() {
			sa.Addr = addr.As4()
		}
		return sa
	}
	sa := &unix.SockaddrInet6{Port: port}
	if addr.IsValid() {
		sa.Addr = addr.As16()
		sa.ZoneId = zoneID(addr.Zone())
	}
	return sa
}

func zoneID(zone string) uint32 {
	if zone == "" {
		return 0
	}
	if n, err := strconv.ParseUint(zone, 10, 32); err == nil {
		return uint32(n)
	}
	if ifi, err := net.InterfaceByName(zone); err == nil {
		return uint32(ifi.Index)
	}
	return 0
}

// drain passes the packets that have arrived to receive, and the reasons to ignore a packet to discard.
func (l listener) drain(receive func(Packet, netip.Addr, bool) string, discard func(string)) {
	var data [128]byte
	var control [64]byte
	for range maxDrain {
		n, cn, _, from, err := unix.Recvmsg(l.fd, data[:], control[:], 0)
		if errors.Is(err, unix.EAGAIN) {
			return
		}
		if err != nil {
			discard("receive error")
			return
		}
		if ttl := receivedTTL(control[:cn]); !l.multihop && ttl != maxTTL {
			discard("TTL below 255")
			continue
		}
		p, err := Parse(data[:n])
		if err != nil {
			discard("malformed")
			continue
		}
		if reason := receive(p, sender(from), l.multihop); reason != "" {
			discard(reason)
		}
	}
}

// sender returns an address with the name of its interface as zone when it is link-local.
func sender(sa unix.Sockaddr) netip.Addr {
	switch sa := sa.(type) {
	case *unix.SockaddrInet4:
		return netip.AddrFrom4(sa.Addr)
	case *unix.SockaddrInet6:
		a := netip.AddrFrom16(sa.Addr)
		if sa.ZoneId == 0 {
			return a
		}
		if ifi, err := net.InterfaceByIndex(int(sa.ZoneId)); err == nil {
			return a.WithZone(ifi.Name)
		}
	}
	return netip.Addr{}
}

// receivedTTL returns 0 when the control message is missing.
func receivedTTL(control []byte) int {
	messages, err := unix.ParseSocketControlMessage(control)
	if err != nil {
		return 0
	}
	for _, m := range messages {
		v4 := m.Header.Level == unix.IPPROTO_IP && m.Header.Type == unix.IP_TTL
		v6 := m.Header.Level == unix.IPPROTO_IPV6 && m.Header.Type == unix.IPV6_HOPLIMIT
		if (v4 || v6) && len(m.Data) > 0 {
			return int(m.Data[0]) // an int of the host, little endian on all supported platforms
		}
	}
	return 0
}

// transmit sends a packet. A failure is a problem of the session until a packet was sent.
func (s *session) transmit(p Packet) {
	err := s.open()
	if err == nil {
		to := sockaddr(s.family(), s.Addr, s.port())
		err = unix.Sendto(s.socket, p.Append(nil), 0, to)
	}
	s.problem = ""
	if err != nil && !errors.Is(err, unix.ECONNREFUSED) { // an ICMP error about an earlier packet
		s.problem = err.Error()
	}
}

func (s *session) family() int {
	if s.Addr.Is4() {
		return unix.AF_INET
	}
	return unix.AF_INET6
}

func (s *session) port() int {
	if s.Multihop {
		return portMultihop
	}
	return portSingleHop
}

// open gives the session a socket with a source port of its own (RFC 5881, section 4).
func (s *session) open() (err error) {
	const first, ports, attempts = 49152, 1 << 14, 16
	for range attempts {
		if s.socket >= 0 {
			return nil
		}
		s.socket, err = bound(s.family(), s.Source, first+rand.IntN(ports))
		if err != nil && !errors.Is(err, unix.EADDRINUSE) {
			return err
		}
	}
	return err
}

// close tells the neighbor that the session ends as planned, as often as it takes if some packets are lost.
func (s *session) close() {
	s.end()
	for range 3 {
		s.transmit(s.packet(false))
	}
	if s.socket >= 0 {
		_ = unix.Close(s.socket)
		s.socket = -1
	}
}
