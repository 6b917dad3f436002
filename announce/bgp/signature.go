package bgp

import (
	"crypto/hmac"
	"crypto/md5"
	"encoding/binary"
	"errors"
	"net"
	"net/netip"

	"github.com/steelyard-lb/steelyard/announce/bgp/guard"
	"golang.org/x/sys/unix"
)

// signature is what a peer's TCP segments show about its password (RFC 2385).
type signature uint8

const (
	signatureUnknown  signature = iota // no SYN was received
	signatureRight                     // both sides have the same password
	signatureNone                      // neither side has a password
	signatureMissing                   // the peer has no password, this node has one
	signatureSurplus                   // the peer has a password, this node has none
	signatureMismatch                  // the passwords differ
)

const (
	tcpHeaderLen  = 20
	tcpSYN        = 0x02
	tcpOptionMD5  = 19
	maxSignatures = 64 // segments read in one poll
)

// signatureProbe receives copies of one peer's TCP segments, including those the kernel drops for a bad signature. The
// kernel's counters are not per peer.
type signatureProbe struct{ fd int }

// openSignatureProbe needs CAP_NET_RAW. The probe receives segments sent to source or, if it is zero, to the local
// address that reaches the peer.
func openSignatureProbe(peer, source netip.Addr, device string) (*signatureProbe, error) {
	family, zone := unix.AF_INET, uint32(0)
	if peer.Is6() {
		family = unix.AF_INET6
	}
	if ifi, err := net.InterfaceByName(peer.Zone()); err == nil {
		zone = uint32(ifi.Index)
	}
	at := func(a netip.Addr) unix.Sockaddr {
		if a.Is4() {
			return &unix.SockaddrInet4{Addr: a.As4()}
		}
		return &unix.SockaddrInet6{Addr: a.As16(), ZoneId: zone}
	}
	fd, err := unix.Socket(family, unix.SOCK_RAW|unix.SOCK_NONBLOCK|unix.SOCK_CLOEXEC, unix.IPPROTO_TCP)
	if err != nil {
		return nil, err
	}
	if family == unix.AF_INET6 {
		err = unix.SetsockoptInt(fd, unix.IPPROTO_IPV6, unix.IPV6_RECVPKTINFO, 1)
	}
	if device != "" {
		err = errors.Join(err, unix.SetsockoptString(fd, unix.SOL_SOCKET, unix.SO_BINDTODEVICE, device))
	}
	if source.IsValid() {
		err = errors.Join(err, unix.Bind(fd, at(source)))
	}
	// Only segments from this address arrive, and few are enough, because the socket is read once per second.
	err = errors.Join(err, unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_RCVBUF, 16<<10), unix.Connect(fd, at(peer)))
	if err != nil {
		_ = unix.Close(fd)
		return nil, err
	}
	return &signatureProbe{fd}, nil
}

func (p *signatureProbe) close() { _ = unix.Close(p.fd) }

// read returns what the last SYN received shows, or signatureUnknown if none has arrived. port is the peer's port,
// listen this node's.
func (p *signatureProbe) read(peer netip.Addr, port, listen uint16, password string) (last signature) {
	var data [2048]byte
	var control [128]byte
	for range maxSignatures {
		n, cn, _, _, err := unix.Recvmsg(p.fd, data[:], control[:], 0)
		if err != nil {
			return last
		}
		segment := data[:n]
		var local netip.Addr
		if peer.Is4() { // IPv4 raw sockets include the IP header
			if n < 20 || n < int(data[0]&0xf)*4 {
				continue
			}
			local, segment = netip.AddrFrom4([4]byte(data[16:20])), segment[int(data[0]&0xf)*4:]
		} else if local = destination(control[:cn]); !local.IsValid() {
			continue
		}
		if s := signatureOf(segment, peer, local, port, listen, password); s != signatureUnknown {
			last = s
		}
	}
	return last
}

// destination returns the address in the IPV6_PKTINFO control message.
func destination(control []byte) netip.Addr {
	messages, err := unix.ParseSocketControlMessage(control)
	if err != nil {
		return netip.Addr{}
	}
	for _, m := range messages {
		if m.Header.Level == unix.IPPROTO_IPV6 && m.Header.Type == unix.IPV6_PKTINFO && len(m.Data) >= 16 {
			return netip.AddrFrom16([16]byte(m.Data[:16]))
		}
	}
	return netip.Addr{}
}

// signatureOf returns what a TCP segment from a peer to this node shows, or signatureUnknown if it is not a SYN for
// BGP.
func signatureOf(b []byte, from, to netip.Addr, port, listen uint16, password string) signature {
	if len(b) < tcpHeaderLen {
		return signatureUnknown
	}
	source, dest, header := binary.BigEndian.Uint16(b), binary.BigEndian.Uint16(b[2:]), int(b[12]>>4)*4
	if b[13]&tcpSYN == 0 || source != port && dest != listen || header < tcpHeaderLen || header > len(b) {
		return signatureUnknown
	}
	digest := md5Option(b[tcpHeaderLen:header])
	switch {
	case digest == nil && password == "":
		return signatureNone
	case digest == nil:
		return signatureMissing
	case password == "":
		return signatureSurplus
	case hmac.Equal(digest, md5Digest(b, header, from, to, password)):
		return signatureRight
	}
	return signatureMismatch
}

// md5Option returns the digest in the TCP options, or nil if there is none.
func md5Option(options []byte) []byte {
	for len(options) > 0 && options[0] != 0 {
		if options[0] == 1 { // no operation
			options = options[1:]
			continue
		}
		if len(options) < 2 || options[1] < 2 || int(options[1]) > len(options) {
			return nil
		}
		if options[0] == tcpOptionMD5 && options[1] == 18 {
			return options[2:18]
		}
		options = options[options[1]:]
	}
	return nil
}

// md5Digest returns the digest of RFC 2385, section 2, over the pseudo-header, the header without options and with a
// zero checksum, the data and the password.
func md5Digest(segment []byte, header int, from, to netip.Addr, password string) []byte {
	h := md5.New()
	h.Write(from.AsSlice())
	h.Write(to.AsSlice())
	if from.Is4() {
		h.Write([]byte{0, unix.IPPROTO_TCP})
		h.Write(binary.BigEndian.AppendUint16(nil, uint16(len(segment))))
	} else {
		h.Write(binary.BigEndian.AppendUint32(nil, uint32(len(segment))))
		h.Write([]byte{0, 0, 0, unix.IPPROTO_TCP})
	}
	h.Write(segment[:16])
	h.Write([]byte{0, 0}) // the checksum
	h.Write(segment[18:tcpHeaderLen])
	h.Write(segment[header:])
	h.Write([]byte(password))
	return h.Sum(nil)
}

// watchSignatures reads the segments of unconnected peers that do not respond or that are expected to connect. Either
// kernel may drop segments because of the password. It needs permission to open raw sockets.
func (s *Speaker) watchSignatures() {
	o := s.options()
	s.forEachSession(func(p *session) {
		if !p.unanswered() {
			p.forgetSignature()
			return
		}
		if p.probe == nil {
			p.probe, _ = openSignatureProbe(p.peer.Address, p.peer.Source, p.peer.Device)
		}
		if p.probe != nil {
			seen := p.probe.read(p.peer.Address, p.peer.Port, uint16(max(o.ListenPort, 0)), p.peer.Password)
			if seen != signatureUnknown {
				p.signature = seen
			}
		}
	})
}

// unanswered reports whether this node waits for a peer that does not respond or is expected to connect.
func (n *session) unanswered() bool {
	switch guard.State(n.state) {
	case guard.OpenSent, guard.OpenConfirm, guard.Established:
		return false
	}
	return n.peer.passive() || n.dialErr != nil && isTimeout(n.dialErr)
}

// forgetSignature closes the probe. Speaker.mu is held.
func (n *session) forgetSignature() {
	if n.probe != nil {
		n.probe.close()
	}
	n.probe, n.signature = nil, signatureUnknown
}
