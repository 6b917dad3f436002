package guard

import (
	"encoding/binary"
	"net/netip"
	"time"
)

// Capability codes (IANA registry "Capability Codes").
const (
	capMultiprotocol   = 1  // RFC 4760
	capRouteRefresh    = 2  // RFC 2918
	capExtendedNextHop = 5  // RFC 8950
	capGracefulRestart = 64 // RFC 4724
	capFourOctetAS     = 65 // RFC 6793
	capLongLived       = 71 // RFC 9494
	capHostname        = 73 // draft-walton-bgp-hostname-capability
)

const (
	asTrans             = 23456 // RFC 6793
	paramCapabilities   = 2     // RFC 5492
	paramExtendedLength = 255   // RFC 9072
	minHoldTime         = 3     // RFC 4271, section 4.2; or 0
	afiIPv4             = 1
	afiIPv6             = 2
	safiUnicast         = 1
)

// Open has the fields of an OPEN (RFC 4271, section 4.2) that this package uses.
type Open struct {
	ASN      uint32
	HoldTime uint16 // seconds; 0 for no KEEPALIVEs
	ID       netip.Addr
	// V4 and V6 say that unicast routes of the family are supported. Without a multiprotocol capability, only V4 is set
	// (RFC 4760, section 8).
	V4, V6 bool
	// FourOctetAS says that AS_PATHs have four-byte AS numbers (RFC 6793).
	FourOctetAS  bool
	RouteRefresh bool
	// ExtendedNextHop says that IPv4 unicast routes may have an IPv6 next hop (RFC 8950).
	ExtendedNextHop bool
	// GracefulRestart says that the OPEN has this capability (RFC 4724), with the time in seconds, the Restart State
	// bit, and the Forwarding State bit for the families of the OPEN.
	GracefulRestart      bool
	RestartTime          uint16
	Restarted, Forwarded bool
	// LongLived is the long-lived graceful restart time in seconds, 24 bits, or 0 for none. It is not read from peers,
	// because their routes are discarded. LongLivedAware says that the peer has this capability, whatever its time.
	LongLived      uint32
	LongLivedAware bool
	Hostname       string
}

func (o *Open) message() []byte {
	var caps []byte
	add := func(code byte, value ...byte) { caps = append(append(caps, code, byte(len(value))), value...) }
	family := func(on bool, afi byte) {
		if on {
			add(capMultiprotocol, 0, afi, 0, safiUnicast)
		}
	}
	family(o.V4, afiIPv4)
	family(o.V6, afiIPv6)
	if o.RouteRefresh {
		add(capRouteRefresh)
	}
	if o.ExtendedNextHop {
		add(capExtendedNextHop, 0, afiIPv4, 0, safiUnicast, 0, afiIPv6)
	}
	if o.FourOctetAS {
		add(capFourOctetAS, binary.BigEndian.AppendUint32(nil, o.ASN)...)
	}
	if o.GracefulRestart {
		add(capGracefulRestart, o.restart()...)
	}
	if o.GracefulRestart && (o.LongLived > 0 || o.LongLivedAware) {
		add(capLongLived, o.longLived()...)
	}
	if n := min(len(o.Hostname), 64); n > 0 {
		add(capHostname, append(append([]byte{byte(n)}, o.Hostname[:n]...), 0)...)
	}
	asn := uint16(asTrans)
	if o.ASN <= 0xffff {
		asn = uint16(o.ASN)
	}
	body := []byte{4}
	body = binary.BigEndian.AppendUint16(body, asn)
	body = binary.BigEndian.AppendUint16(body, o.HoldTime)
	body = append(body, o.ID.AsSlice()...)
	body = append(body, byte(2+len(caps)), paramCapabilities, byte(len(caps)))
	return encode(typeOpen, append(body, caps...))
}

// restart returns the value of the graceful restart capability (RFC 4724, section 3).
func (o *Open) restart() []byte {
	flags := o.RestartTime & 0xfff
	if o.Restarted {
		flags |= 0x8000
	}
	value := binary.BigEndian.AppendUint16(nil, flags)
	forwarded := byte(0)
	if o.Forwarded {
		forwarded = 0x80
	}
	if o.V4 {
		value = append(value, 0, afiIPv4, safiUnicast, forwarded)
	}
	if o.V6 {
		value = append(value, 0, afiIPv6, safiUnicast, forwarded)
	}
	return value
}

// longLived returns the value of the long-lived graceful restart capability (RFC 9494, section 3.1).
func (o *Open) longLived() (value []byte) {
	if o.LongLived == 0 {
		return nil
	}
	forwarded := byte(0)
	if o.Forwarded {
		forwarded = 0x80
	}
	time := binary.BigEndian.AppendUint32(nil, o.LongLived&(1<<24-1))[1:]
	for _, f := range []struct {
		on  bool
		afi byte
	}{{o.V4, afiIPv4}, {o.V6, afiIPv6}} {
		if f.on {
			value = append(append(value, 0, f.afi, safiUnicast, forwarded), time...)
		}
	}
	return value
}

// parseOpen reads the body of an OPEN, which has at least ten bytes. It performs the checks that do not depend on the
// configuration (RFC 4271, section 6.2).
func parseOpen(body []byte) (*Open, error) {
	if version := body[0]; version != 4 {
		return nil, protocolError(codeOpen, 1, []byte{0, 4}, "the peer uses BGP version %d", version)
	}
	o := &Open{
		ASN: uint32(binary.BigEndian.Uint16(body[1:])), HoldTime: binary.BigEndian.Uint16(body[3:]),
		ID: netip.AddrFrom4([4]byte(body[5:9])),
	}
	params, n, wide := body[10:], int(body[9]), false
	if n == paramExtendedLength && len(params) >= 3 && params[0] == paramExtendedLength {
		n, params, wide = int(binary.BigEndian.Uint16(params[1:])), params[3:], true // RFC 9072, section 2
	}
	if n != len(params) {
		return nil, protocolError(codeOpen, 0, nil, "optional parameters of %d bytes in a field of %d", n, len(params))
	}
	multiprotocol := false
	for len(params) > 0 {
		kind, value, rest := nextParameter(params, wide)
		if rest == nil {
			return nil, protocolError(codeOpen, 0, nil, "an optional parameter of the OPEN is truncated")
		}
		if kind != paramCapabilities {
			return nil, protocolError(codeOpen, 4, nil, "unsupported optional parameter %d", kind)
		}
		if err := o.capabilities(value, &multiprotocol); err != nil {
			return nil, err
		}
		params = rest
	}
	o.V4 = o.V4 || !multiprotocol
	o.LongLivedAware = o.LongLivedAware && o.GracefulRestart // RFC 9494, section 4.1
	return o, nil
}

// nextParameter splits off the first optional parameter; rest is nil if it is truncated.
func nextParameter(b []byte, wide bool) (kind byte, value, rest []byte) {
	head := 2
	if wide {
		head = 3
	}
	if len(b) < head {
		return 0, nil, nil
	}
	n := int(b[1])
	if wide {
		n = int(binary.BigEndian.Uint16(b[1:]))
	}
	if len(b) < head+n {
		return 0, nil, nil
	}
	return b[0], b[head : head+n], b[head+n:]
}

// capabilities reads the capabilities in one parameter (RFC 5492, section 4). It ignores unknown ones.
func (o *Open) capabilities(b []byte, multiprotocol *bool) error {
	for len(b) > 0 {
		if len(b) < 2 || len(b) < 2+int(b[1]) {
			return protocolError(codeOpen, 0, nil, "a capability of the OPEN is truncated")
		}
		code, value := b[0], b[2:2+int(b[1])]
		b = b[2+len(value):]
		wrong := func() error {
			return protocolError(codeOpen, 0, nil, "capability %d of %d bytes", code, len(value))
		}
		switch code {
		case capMultiprotocol:
			if len(value) != 4 {
				return wrong()
			}
			*multiprotocol = true
			afi, unicast := binary.BigEndian.Uint16(value), value[3] == safiUnicast
			o.V4 = o.V4 || afi == afiIPv4 && unicast
			o.V6 = o.V6 || afi == afiIPv6 && unicast
		case capRouteRefresh:
			o.RouteRefresh = true
		case capExtendedNextHop:
			if len(value)%6 != 0 {
				return wrong()
			}
			for ; len(value) > 0; value = value[6:] {
				is := [6]byte(value) == [6]byte{0, afiIPv4, 0, safiUnicast, 0, afiIPv6}
				o.ExtendedNextHop = o.ExtendedNextHop || is
			}
		case capFourOctetAS:
			if len(value) != 4 {
				return wrong()
			}
			o.FourOctetAS, o.ASN = true, binary.BigEndian.Uint32(value)
		case capGracefulRestart:
			if len(value) < 2 || len(value)%4 != 2 {
				return wrong()
			}
			flags := binary.BigEndian.Uint16(value)
			o.GracefulRestart, o.RestartTime, o.Restarted = true, flags&0xfff, flags&0x8000 != 0
		case capLongLived:
			o.LongLivedAware = true
		}
	}
	return nil
}

// check validates a peer's OPEN against ours and its expected AS (RFC 4271, section 6.2; RFC 6286). If expected is 0,
// any AS except ours is valid.
func (o *Open) check(ours *Open, expected uint32) error {
	switch {
	case expected == 0 && o.ASN == ours.ASN:
		return protocolError(codeOpen, 2, nil, "the peer has this node's AS number, %d, so it is not external", o.ASN)
	case expected == 0 && (o.ASN == 0 || o.ASN == asTrans): // RFC 7607, section 2; RFC 6793, section 9
		return protocolError(codeOpen, 2, nil, "the peer has the reserved AS number %d", o.ASN)
	case expected != 0 && o.ASN != expected:
		return protocolError(codeOpen, 2, nil, "as number mismatch expected %d, received %d", expected, o.ASN)
	case o.ID.IsUnspecified():
		return protocolError(codeOpen, 3, nil, "the peer has the BGP identifier 0.0.0.0")
	case o.ASN == ours.ASN && o.ID == ours.ID:
		return protocolError(codeOpen, 3, nil, "the peer has this node's BGP identifier, %v", o.ID)
	case o.HoldTime != 0 && o.HoldTime < minHoldTime:
		return protocolError(codeOpen, 6, nil, "the peer proposes a hold time of %d s", o.HoldTime)
	case !o.V4 && !o.V6:
		var data []byte
		for _, afi := range []byte{afiIPv4, afiIPv6} {
			data = append(data, capMultiprotocol, 4, 0, afi, 0, safiUnicast)
		}
		return protocolError(codeOpen, 7, data, "the peer wants neither IPv4 nor IPv6 unicast routes")
	}
	return nil
}

// holdTime returns the negotiated hold time. 0 means no KEEPALIVEs (RFC 4271, section 4.2).
func holdTime(a, b *Open) time.Duration {
	return time.Duration(min(a.HoldTime, b.HoldTime)) * time.Second
}
