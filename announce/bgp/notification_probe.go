package bgp

import (
	"context"
	"fmt"
	"io"
	"net"
	"net/netip"
	"syscall"
	"time"

	"github.com/osrg/gobgp/v3/pkg/packet/bgp"
	"golang.org/x/sys/unix"
)

const (
	// probeTimeout bounds a NOTIFICATION probe.
	probeTimeout = 3 * time.Second
	// probeInterval is the minimum time between two probes of a peer. Routers accept no connection for some time
	// after an error (BIRD: error wait time).
	probeInterval = 2 * time.Second
	// refusalUnknown is the fault until the reason of a refusal is known. It is logged only after logRefusalAfter.
	refusalUnknown  = "the peer refused the session; see its log for the reason"
	logRefusalAfter = 10 * time.Second
	// refusalTTL is how long a known reason is assumed for later refusals, before the peer is probed again.
	refusalTTL = time.Minute
)

// probeNotification returns why a peer rejects the session: it connects, sends an OPEN and reads the response. gobgp v3
// discards a NOTIFICATION received before the session is established, which is where peers report a wrong ASN or hold
// time. It returns "" when the peer accepts the OPEN or does not respond.
func (o *Options) probeNotification(ctx context.Context, p Peer) string {
	ctx, cancel := context.WithTimeout(ctx, probeTimeout)
	defer cancel()
	d := net.Dialer{Control: func(_, _ string, c syscall.RawConn) error { return o.setSocketOptions(c, p) }}
	if p.Source.IsValid() {
		d.LocalAddr = net.TCPAddrFromAddrPort(netip.AddrPortFrom(p.Source, 0))
	}
	conn, err := d.DialContext(ctx, "tcp", netip.AddrPortFrom(p.Address, p.Port).String())
	if err != nil {
		return ""
	}
	defer conn.Close()
	deadline, _ := ctx.Deadline()
	_ = conn.SetDeadline(deadline)
	open, err := o.openMessage(p).Serialize()
	if err != nil {
		return ""
	}
	if _, err := conn.Write(open); err != nil {
		return ""
	}
	for range 2 { // the first message may be an OPEN
		m, err := readMessage(conn)
		if err != nil {
			return ""
		}
		if n, ok := m.Body.(*bgp.BGPNotification); ok {
			return "received NOTIFICATION: " + bgp.NewNotificationErrorCode(n.ErrorCode, n.ErrorSubcode).String()
		}
		if m.Header.Type == bgp.BGP_MSG_KEEPALIVE {
			return "" // the OPEN is accepted
		}
	}
	return ""
}

// openMessage returns an OPEN with those fields of the OPEN of gobgp that a peer may reject.
func (o *Options) openMessage(p Peer) *bgp.BGPMessage {
	asn := uint16(bgp.AS_TRANS)
	if o.ASN <= 65535 {
		asn = uint16(o.ASN)
	}
	caps := []bgp.ParameterCapabilityInterface{
		bgp.NewCapMultiProtocol(bgp.RF_IPv4_UC), bgp.NewCapMultiProtocol(bgp.RF_IPv6_UC),
		bgp.NewCapFourOctetASNumber(o.ASN),
	}
	return bgp.NewBGPOpenMessage(asn, uint16(p.HoldTime/time.Second), o.RouterID.String(),
		[]bgp.OptionParameterInterface{bgp.NewOptionParameterCapability(caps)})
}

func readMessage(r io.Reader) (*bgp.BGPMessage, error) {
	head := make([]byte, bgp.BGP_HEADER_LENGTH)
	if _, err := io.ReadFull(r, head); err != nil {
		return nil, err
	}
	var h bgp.BGPHeader
	if err := h.DecodeFromBytes(head); err != nil {
		return nil, err
	}
	if h.Len < bgp.BGP_HEADER_LENGTH || h.Len > bgp.BGP_MAX_MESSAGE_LENGTH {
		return nil, fmt.Errorf("message of %d bytes", h.Len)
	}
	body := make([]byte, h.Len-bgp.BGP_HEADER_LENGTH)
	if _, err := io.ReadFull(r, body); err != nil {
		return nil, err
	}
	return bgp.ParseBGPBody(&h, body)
}

// setSocketOptions sets the MD5 signature and the TTL that the peer expects.
func (o *Options) setSocketOptions(c syscall.RawConn, p Peer) error {
	var err error
	controlErr := c.Control(func(fd uintptr) {
		if p.Password != "" {
			err = unix.SetsockoptTCPMD5Sig(int(fd), unix.IPPROTO_TCP, unix.TCP_MD5SIG, md5Key(p))
		}
		if ttl := p.ttl(o.ASN); ttl > 0 && err == nil {
			level, name := unix.IPPROTO_IP, unix.IP_TTL
			if p.Address.Is6() {
				level, name = unix.IPPROTO_IPV6, unix.IPV6_UNICAST_HOPS
			}
			err = unix.SetsockoptInt(int(fd), level, name, ttl)
		}
	})
	if controlErr != nil {
		return controlErr
	}
	return err
}

// ttl returns the TTL (IPv6: hop limit) of packets to p; 0: the default of the kernel.
func (p Peer) ttl(asn uint32) int {
	switch {
	case p.TTLSecurity:
		return 255
	case p.ASN == asn:
		return 0
	default:
		return max(p.Multihop, 1)
	}
}

func md5Key(p Peer) *unix.TCPMD5Sig {
	sig := &unix.TCPMD5Sig{Keylen: uint16(len(p.Password))}
	copy(sig.Key[:], p.Password)
	// sig.Addr.Data is a sockaddr_in or sockaddr_in6 without its family: it begins with the port and, for IPv6, flow
	// info.
	if a := p.Address; a.Is4() {
		sig.Addr.Family = unix.AF_INET
		copy(sig.Addr.Data[2:], a.AsSlice())
	} else {
		sig.Addr.Family = unix.AF_INET6
		copy(sig.Addr.Data[6:], a.AsSlice())
	}
	return sig
}
