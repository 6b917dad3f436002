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
	// asking bounds how long a peer may take to say why it refuses us.
	asking = 3 * time.Second
	// askAgain is the least time between two such questions; routers answer none while they hold a grudge (BIRD: error
	// wait time).
	askAgain = 2 * time.Second
	// unsaid is what is told until a peer has given its reason, and logged when it does not within sayWithin.
	unsaid    = "the peer refused the session; its log says why"
	sayWithin = 10 * time.Second
	// sayAgain is for how long a reason that a peer has given is taken for that of later refusals.
	sayAgain = time.Minute
)

// why asks a peer that has refused a session for the reason: it connects, sends an OPEN and reads the answer. gobgp
// v3 throws away what a NOTIFICATION says that comes before the session is established, and that is where a wrong ASN
// or hold time is told. "" when the peer has nothing against us, or says nothing.
func (o *Options) why(ctx context.Context, p Peer) string {
	ctx, cancel := context.WithTimeout(ctx, asking)
	defer cancel()
	d := net.Dialer{Control: func(_, _ string, c syscall.RawConn) error { return o.socket(c, p) }}
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
	for range 2 { // its OPEN may come first
		m, err := readMessage(conn)
		if err != nil {
			return ""
		}
		if n, ok := m.Body.(*bgp.BGPNotification); ok {
			return "the peer says: " + bgp.NewNotificationErrorCode(n.ErrorCode, n.ErrorSubcode).String()
		}
		if m.Header.Type == bgp.BGP_MSG_KEEPALIVE {
			return "" // it takes our OPEN
		}
	}
	return ""
}

// openMessage is the OPEN that gobgp sends, as far as a peer could find fault with it.
func (o *Options) openMessage(p Peer) *bgp.BGPMessage {
	asn := uint16(bgp.AS_TRANS)
	if o.ASN <= 65535 {
		asn = uint16(o.ASN)
	}
	caps := []bgp.ParameterCapabilityInterface{
		bgp.NewCapMultiProtocol(bgp.RF_IPv4_UC), bgp.NewCapMultiProtocol(bgp.RF_IPv6_UC), bgp.NewCapFourOctetASNumber(o.ASN),
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

// socket sets what the peer expects of our packets: signature and hop limit.
func (o *Options) socket(c syscall.RawConn, p Peer) error {
	var err error
	controlErr := c.Control(func(fd uintptr) {
		if p.Password != "" {
			err = unix.SetsockoptTCPMD5Sig(int(fd), unix.IPPROTO_TCP, unix.TCP_MD5SIG, md5Key(p))
		}
		if hops := p.hops(o.ASN); hops > 0 && err == nil {
			level, name := unix.IPPROTO_IP, unix.IP_TTL
			if p.Address.Is6() {
				level, name = unix.IPPROTO_IPV6, unix.IPV6_UNICAST_HOPS
			}
			err = unix.SetsockoptInt(int(fd), level, name, hops)
		}
	})
	if controlErr != nil {
		return controlErr
	}
	return err
}

// hops is the hop limit of packets to p; 0: that of the system.
func (p Peer) hops(asn uint32) int {
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
	// sig.Addr is a struct sockaddr_in or sockaddr_in6 without its family: port, and for IPv6 flow info, come first.
	if a := p.Address; a.Is4() {
		sig.Addr.Family = unix.AF_INET
		copy(sig.Addr.Data[2:], a.AsSlice())
	} else {
		sig.Addr.Family = unix.AF_INET6
		copy(sig.Addr.Data[6:], a.AsSlice())
	}
	return sig
}
