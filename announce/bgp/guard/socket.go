package guard

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// dialTimeout limits an attempt to connect. It allows two retransmissions of the SYN.
const dialTimeout = 5 * time.Second

func dial(ctx context.Context, c *Config) (socket, error) {
	d := net.Dialer{
		Timeout: dialTimeout, KeepAlive: -1,
		Control: func(_, _ string, raw syscall.RawConn) error {
			return control(raw, func(fd int) error { return errors.Join(setKey(fd, c), setOptions(fd, c)) })
		},
	}
	if c.Source.IsValid() {
		d.LocalAddr = net.TCPAddrFromAddrPort(netip.AddrPortFrom(c.Source, 0))
	}
	conn, err := d.DialContext(ctx, "tcp", netip.AddrPortFrom(c.Address, c.Port).String())
	if err != nil {
		return nil, err
	}
	return conn.(*net.TCPConn), nil
}

func control(raw syscall.RawConn, f func(fd int) error) error {
	var err error
	if controlErr := raw.Control(func(fd uintptr) { err = f(int(fd)) }); controlErr != nil {
		return controlErr
	}
	return err
}

// setKey sets the peer's MD5 key (RFC 2385) on an unconnected socket, or replaces it.
func setKey(fd int, c *Config) error {
	if c.Password == "" {
		return nil
	}
	err := unix.SetsockoptTCPMD5Sig(fd, unix.IPPROTO_TCP, unix.TCP_MD5SIG, md5Key(c.Address, c.Password))
	if err != nil {
		return fmt.Errorf("set the password: %w", os.NewSyscallError("setsockopt", err))
	}
	return nil
}

func clearKey(fd int, peer netip.Addr) error {
	return unix.SetsockoptTCPMD5Sig(fd, unix.IPPROTO_TCP, unix.TCP_MD5SIG, md5Key(peer, ""))
}

func md5Key(peer netip.Addr, password string) *unix.TCPMD5Sig {
	sig := &unix.TCPMD5Sig{Keylen: uint16(len(password))}
	copy(sig.Key[:], password)
	// sig.Addr.Data is a sockaddr_in or sockaddr_in6 without the family, so it begins with the port and, for IPv6, flow
	// info.
	if peer.Is4() {
		sig.Addr.Family = unix.AF_INET
		copy(sig.Addr.Data[2:], peer.AsSlice())
	} else {
		sig.Addr.Family = unix.AF_INET6
		copy(sig.Addr.Data[6:], peer.AsSlice())
	}
	return sig
}

// setOptions sets the TTL, the lowest accepted TTL (RFC 5082) and the device.
func setOptions(fd int, c *Config) error {
	level, ttl, lowest := unix.IPPROTO_IP, unix.IP_TTL, unix.IP_MINTTL
	if c.Address.Is6() {
		level, ttl, lowest = unix.IPPROTO_IPV6, unix.IPV6_UNICAST_HOPS, unix.IPV6_MINHOPCOUNT
	}
	set := func(name, value int) error {
		if value == 0 {
			return nil
		}
		return os.NewSyscallError("setsockopt", unix.SetsockoptInt(fd, level, name, value))
	}
	err := errors.Join(set(ttl, c.TTL), set(lowest, c.MinTTL))
	if c.Device != "" {
		bound := unix.SetsockoptString(fd, unix.SOL_SOCKET, unix.SO_BINDTODEVICE, c.Device)
		if bound != nil {
			err = errors.Join(err, fmt.Errorf("bind to device %s: %w", c.Device, bound))
		}
	}
	return err
}

// setRangeKey sets the MD5 key of a range on a listening socket; "" removes it. A key for a single address takes
// precedence. Accepted connections inherit the key.
func setRangeKey(fd int, prefix netip.Prefix, password string) error {
	sig := md5Key(prefix.Addr(), password)
	sig.Flags, sig.Prefixlen = unix.TCP_MD5SIG_FLAG_PREFIX, uint8(prefix.Bits())
	err := unix.SetsockoptTCPMD5Sig(fd, unix.IPPROTO_TCP, unix.TCP_MD5SIG_EXT, sig)
	if err != nil {
		return fmt.Errorf("set the password of %v: %w", prefix, os.NewSyscallError("setsockopt", err))
	}
	return nil
}

// listen opens a listening socket with the keys of these peers and ranges. Its TTL is 255, because peers with TTL
// security check the TTL of the SYN-ACK. Accepted connections then receive their peer's TTL.
func listen(
	ctx context.Context, at Endpoint, peers []Config, ranges []Range,
) (*net.TCPListener, error) {
	lc := net.ListenConfig{KeepAlive: -1, Control: func(_, _ string, raw syscall.RawConn) error {
		return control(raw, func(fd int) error {
			all := Config{Address: at.Addr(), TTL: 255, Device: at.Device}
			err := setOptions(fd, &all)
			for i := range peers {
				if peers[i].Address.Is4() == at.Addr().Is4() {
					err = errors.Join(err, setKey(fd, &peers[i]))
				}
			}
			for _, r := range ranges {
				if r.Prefix.Addr().Is4() == at.Addr().Is4() && r.Password != "" {
					err = errors.Join(err, setRangeKey(fd, r.Prefix, r.Password))
				}
			}
			return err
		})
	}}
	lc.SetMultipathTCP(false) // MPTCP does not support MD5 signatures
	network := "tcp6"
	if at.Addr().Is4() {
		network = "tcp4"
	}
	l, err := lc.Listen(ctx, network, at.String())
	if err != nil {
		return nil, err
	}
	return l.(*net.TCPListener), nil
}

func addrOf(a net.Addr) netip.Addr {
	if t, ok := a.(*net.TCPAddr); ok {
		return t.AddrPort().Addr().Unmap()
	}
	return netip.Addr{}
}
