package bfd

import (
	"encoding/binary"
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
	maxDrain      = 256  // packets read per socket and step, so that a flood cannot prevent sending
)

type listener struct {
	fd       int
	family   int
	multihop bool
}

// listen opens the sockets for both families and both kinds of session, bound to device unless it is empty. On error,
// it also returns the sockets opened so far.
func listen(device string) (open []listener, err error) {
	for _, multihop := range []bool{false, true} {
		for _, family := range []int{unix.AF_INET, unix.AF_INET6} {
			port := portSingleHop
			if multihop {
				port = portMultihop
			}
			fd, err := bound(family, device, netip.Addr{}, port)
			if errors.Is(err, unix.EAFNOSUPPORT) {
				continue
			}
			if err != nil {
				return open, fmt.Errorf("bfd on UDP port %d: %w", port, err)
			}
			if unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_RCVBUFFORCE, receiveBuffer) != nil {
				_ = unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_RCVBUF, receiveBuffer) // up to net.core.rmem_max
			}
			open = append(open, listener{fd, family, multihop})
		}
	}
	return open, nil
}

// bound returns a socket bound to device, unless it is empty, and to addr, or to all addresses of the family if addr is
// zero. The socket reports the TTL and interface of received packets.
func bound(family int, device string, addr netip.Addr, port int) (fd int, err error) {
	fd, err = unix.Socket(family, unix.SOCK_DGRAM|unix.SOCK_NONBLOCK|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return -1, err
	}
	options := []struct{ level, name, value int }{
		{unix.IPPROTO_IP, unix.IP_RECVTTL, 1},
		{unix.IPPROTO_IP, unix.IP_PKTINFO, 1},
		{unix.IPPROTO_IP, unix.IP_TTL, maxTTL},
		{unix.IPPROTO_IP, unix.IP_TOS, trafficClass},
	}
	if family == unix.AF_INET6 {
		options = []struct{ level, name, value int }{
			{unix.IPPROTO_IPV6, unix.IPV6_V6ONLY, 1},
			{unix.IPPROTO_IPV6, unix.IPV6_RECVHOPLIMIT, 1},
			{unix.IPPROTO_IPV6, unix.IPV6_RECVPKTINFO, 1},
			{unix.IPPROTO_IPV6, unix.IPV6_UNICAST_HOPS, maxTTL},
			{unix.IPPROTO_IPV6, unix.IPV6_TCLASS, trafficClass},
		}
	}
	for _, o := range options {
		if err == nil {
			err = unix.SetsockoptInt(fd, o.level, o.name, o.value)
		}
	}
	if err == nil && device != "" {
		if err = unix.SetsockoptString(fd, unix.SOL_SOCKET, unix.SO_BINDTODEVICE, device); err != nil {
			err = fmt.Errorf("bind to device %s: %w", device, err)
		}
	}
	if err == nil {
		reuse(fd, device != "")
		err = unix.Bind(fd, sockaddr(family, addr, port))
		reuse(fd, false)
	}
	if err != nil {
		_ = unix.Close(fd)
		return -1, err
	}
	return fd, nil
}

// sockaddr returns the socket address of addr, or of all addresses of the family if addr is zero.
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

// datagram is a received packet and its origin.
type datagram struct {
	Packet
	from     netip.Addr // without a zone
	ttl      int
	ifindex  int // arrival interface
	multihop bool
	device   *device // device whose socket received it
}

// drain passes received packets to receive, and its reasons for ignoring them to discard. It stops after maxDrain
// packets, and reports whether it did.
func (l listener) drain(receive func(datagram) string, discard func(string)) (full bool) {
	var data, control [128]byte
	for range maxDrain {
		n, cn, _, from, err := unix.Recvmsg(l.fd, data[:], control[:], 0)
		if errors.Is(err, unix.EAGAIN) {
			return false
		}
		if err != nil {
			discard("receive error")
			return false
		}
		p, err := Parse(data[:n])
		if err != nil {
			discard("malformed")
			continue
		}
		d := datagram{Packet: p, from: sender(from), multihop: l.multihop}
		d.ttl, d.ifindex = arrival(control[:cn])
		if reason := receive(d); reason != "" {
			discard(reason)
		}
	}
	return true
}

func sender(sa unix.Sockaddr) netip.Addr {
	switch sa := sa.(type) {
	case *unix.SockaddrInet4:
		return netip.AddrFrom4(sa.Addr)
	case *unix.SockaddrInet6:
		return netip.AddrFrom16(sa.Addr)
	}
	return netip.Addr{}
}

// arrival returns a packet's TTL and arrival interface, or 0 for each if the control message is missing.
func arrival(control []byte) (ttl, ifindex int) {
	messages, err := unix.ParseSocketControlMessage(control)
	if err != nil {
		return 0, 0
	}
	for _, m := range messages {
		number := func(offset int) int {
			if len(m.Data) < offset+4 {
				return 0
			}
			return int(int32(binary.NativeEndian.Uint32(m.Data[offset:])))
		}
		switch [2]int{int(m.Header.Level), int(m.Header.Type)} {
		case [2]int{unix.IPPROTO_IP, unix.IP_TTL}, [2]int{unix.IPPROTO_IPV6, unix.IPV6_HOPLIMIT}:
			ttl = number(0)
		case [2]int{unix.IPPROTO_IP, unix.IP_PKTINFO}: // struct in_pktinfo begins with the index
			ifindex = number(0)
		case [2]int{unix.IPPROTO_IPV6, unix.IPV6_PKTINFO}: // struct in6_pktinfo: the index follows the address
			ifindex = number(16)
		}
	}
	return ttl, ifindex
}

// transmit sends a packet. The session's problem is the last failure, until a packet is sent.
func (s *session) transmit(p Packet) {
	err := s.open()
	if err == nil {
		to := sockaddr(s.family(), s.Addr, s.port())
		err = unix.Sendto(s.socket, p.Append(nil), 0, to)
	}
	s.problem = ""
	if err != nil && !errors.Is(err, unix.ECONNREFUSED) { // ECONNREFUSED is an ICMP error about an earlier packet
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
		s.socket, err = bound(s.family(), s.Device, s.Source, first+rand.IntN(ports))
		if err != nil && !errors.Is(err, unix.EADDRINUSE) {
			return err
		}
	}
	return err
}

// close tells the neighbor about the planned end of the session, several times because packets can be lost.
func (s *session) close() {
	s.end()
	for range 3 {
		s.transmit(s.packet(false))
	}
	s.closeSocket()
}

func (s *session) closeSocket() {
	if s.socket >= 0 {
		_ = unix.Close(s.socket)
		s.socket = -1
	}
}
