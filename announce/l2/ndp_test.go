package l2

import (
	"encoding/binary"
	"encoding/hex"
	"net"
	"net/netip"
	"slices"
	"strings"
	"testing"

	"github.com/mdlayher/ethernet"
	"github.com/mdlayher/ndp"
	"github.com/steelyard-lb/steelyard/lb/lbtest/must"
	"github.com/vishvananda/netlink"
	"golang.org/x/net/bpf"
	"golang.org/x/sys/unix"
)

// solicitation returns a valid Ethernet frame with a neighbour solicitation for vip6.
func solicitation(t *testing.T) []byte {
	t.Helper()
	m := &ndp.NeighborSolicitation{TargetAddress: vip6}
	return frameToUs(t, net.HardwareAddr{2, 0, 0, 0, 0, 1}, "fe80::1", m)
}

// frameToUs returns a valid Ethernet frame to the solicited-node multicast group of vip6.
func frameToUs(t *testing.T, mac net.HardwareAddr, source string, message ndp.Message) []byte {
	t.Helper()
	from, to := netip.MustParseAddr(source), netip.MustParseAddr("ff02::1:ff00:10")
	m := must.Get(ndp.MarshalMessageChecksum(message, from, to))(t)
	frame := slices.Concat([]byte{0x33, 0x33, 0xff, 0, 0, 0x10}, mac, []byte{0x86, 0xdd})
	frame = append(frame, 0x60, 0, 0, 0, 0, 0, 58, 255)
	binary.BigEndian.PutUint16(frame[18:], uint16(len(m)))
	return slices.Concat(frame, from.AsSlice(), to.AsSlice(), m)
}

func TestParseNeighbour(t *testing.T) {
	valid := solicitation(t)
	size := len(valid) - 54
	for _, tt := range []struct {
		name   string
		change func(b []byte) []byte
		ok     bool
	}{
		{"valid", func(b []byte) []byte { return b }, true},
		{"padded", func(b []byte) []byte { return append(b, 0, 0, 0) }, true},
		{"empty", func([]byte) []byte { return nil }, false},
		{"no complete IPv6 header", func(b []byte) []byte { return b[:53] }, false},
		{"header only", func(b []byte) []byte { return b[:54] }, false},
		{"length of 7", func(b []byte) []byte { b[19] = 7; return b }, false},
		{"length of 0", func(b []byte) []byte { b[19] = 0; return b }, false},
		{"length of one byte too many", func(b []byte) []byte { b[19]++; return b }, false},
		{"length of 65535", func(b []byte) []byte { b[18], b[19] = 255, 255; return b }, false},
		{"truncated", func(b []byte) []byte { return b[:len(b)-1] }, false},
		{"wrong checksum", func(b []byte) []byte { b[56] ^= 1; return b }, false},
		{"other target than summed", func(b []byte) []byte { b[len(b)-1] ^= 1; return b }, false},
		{"other source than summed", func(b []byte) []byte { b[22+15] ^= 1; return b }, false},
	} {
		m := parseNeighbour(tt.change(slices.Clone(valid)))
		must.True(t, (m != nil) == tt.ok, "%s: got %+v; want valid: %t", tt.name, m, tt.ok)
		if m == nil {
			continue
		}
		s, isSolicitation := m.m.(*ndp.NeighborSolicitation)
		must.True(t, isSolicitation && s.TargetAddress == vip6, "%s: got %+v", tt.name, m.m)
		must.True(t, m.from.String() == "fe80::1" && m.mac.String() == "02:00:00:00:00:01",
			"%s: from %s, %s", tt.name, m.from, m.mac)
	}
	must.True(t, size == 24, "the message has %d bytes; want 24", size)
}

// Duplicate address detection solicits the address's group, without the sender's link-layer address.
func TestDetectsDuplicates(t *testing.T) {
	link := func(d ndp.Direction) ndp.Option { return &ndp.LinkLayerAddress{Direction: d, Addr: otherMAC} }
	for _, tt := range []struct {
		name    string
		to      string
		options []ndp.Option
		want    bool
	}{
		{"valid", "ff02::1:ff00:10", nil, true},
		{"nonce", "ff02::1:ff00:10", []ndp.Option{ndp.NewNonce()}, true},
		{"target link-layer address, which is ignored", "ff02::1:ff00:10", []ndp.Option{link(ndp.Target)}, true},
		{"source link-layer address", "ff02::1:ff00:10", []ndp.Option{ndp.NewNonce(), link(ndp.Source)}, false},
		{"to the address", vip6.String(), nil, false},
		{"to all nodes", "ff02::1", nil, false},
	} {
		m := &ndp.NeighborSolicitation{TargetAddress: vip6, Options: tt.options}
		must.Row(t, tt.name, tt.want, detectsDuplicates(m, netip.MustParseAddr(tt.to)))
	}
}

// These messages are invalid although their checksum is correct.
func TestParseNeighbourInvalidMessage(t *testing.T) {
	for _, tt := range []struct {
		name   string
		change func(frame []byte) []byte
		ok     bool
	}{
		{"valid", func(b []byte) []byte { return b }, true},
		{"message of 8 bytes", func(b []byte) []byte { b[19] = 8; return b[:54+8] }, false},
		{"code 1", func(b []byte) []byte { b[55] = 1; return b }, false},
		{"advertisement", func(b []byte) []byte { b[54] = icmpAdvertise; return b }, true},
		{"advertisement with code 1", func(b []byte) []byte { b[54], b[55] = icmpAdvertise, 1; return b }, false},
		{"multicast source", func(b []byte) []byte { b[22], b[23] = 0xff, 0x02; return b }, false},
	} {
		frame := tt.change(solicitation(t))
		frame[56], frame[57] = 0, 0
		binary.BigEndian.PutUint16(frame[56:], icmpChecksum(frame[22:54], frame[54:]))
		m := parseNeighbour(frame)
		must.True(t, (m != nil) == tt.ok, "%s: got %+v; want valid: %t", tt.name, m, tt.ok)
	}
}

func TestNeighbourFilter(t *testing.T) {
	vm := must.Get(bpf.NewVM(neighbourFilter))(t)
	for _, tt := range []struct {
		name                string
		next, hopLimit, typ byte
		accepted            bool
	}{
		{"solicitation", 58, 255, 135, true},
		{"advertisement", 58, 255, 136, true},
		{"routed solicitation", 58, 254, 135, false},
		{"echo request", 58, 255, 128, false},
		{"router advertisement", 58, 255, 134, false},
		{"redirect", 58, 255, 137, false},
		{"TCP", 6, 255, 135, false},
		{"TCP, routed", 6, 64, 136, false},
	} {
		frame := solicitation(t)
		frame[20], frame[21], frame[54] = tt.next, tt.hopLimit, tt.typ
		n := must.Get(vm.Run(frame))(t)
		want := map[bool]int{true: 1500}[tt.accepted]
		must.True(t, n == want, "%s: %d bytes accepted; want %d", tt.name, n, want)
	}
}

// RFC 1071: an odd last byte is padded with zero, and carries are added back.
func TestChecksumArithmetic(t *testing.T) {
	addrs := make([]byte, 32)
	for icmp, want := range map[string]uint16{
		"\x00\x00": ^uint16(58 + 2), "\x00\x00\x01": ^uint16(58 + 3 + 0x100), "\xff\xff\xff\xff": ^uint16(58 + 4),
		"\xff\xc1\x00\x00": ^uint16(0xffff), "\xff\xc2\x00\x00": ^uint16(1),
	} {
		must.Row(t, icmp, want, icmpChecksum(addrs, []byte(icmp)))
	}
}

func TestUsableSource(t *testing.T) {
	address := func(text string, flags int) netlink.Addr {
		a := must.Get(netlink.ParseAddr(text))(t)
		a.Flags = flags
		return *a
	}
	unusable := []netlink.Addr{
		address("2001:db8::1/64", 0), address("fe80::1/64", unix.IFA_F_TENTATIVE),
		address("fe80::2/64", unix.IFA_F_TENTATIVE|unix.IFA_F_DADFAILED),
	}
	must.Equal(t, netip.Addr{}, usableSource(unusable))
	good := address("fe80::3/64", unix.IFA_F_PERMANENT)
	must.Equal(t, netip.MustParseAddr("fe80::3"), usableSource(append(unusable, good)))
}

// rawConn reads a segment's frames, each preceded by its length in two bytes, and records written frames.
type rawConn struct {
	fakeFrames
	in  []byte
	out [][]byte
}

func (c *rawConn) ReadFrom(b []byte) (int, net.Addr, error) {
	if len(c.in) < 2 {
		return 0, nil, net.ErrClosed
	}
	n := min(int(c.in[0])<<8|int(c.in[1]), len(c.in)-2)
	frame := c.in[2 : 2+n]
	c.in = c.in[2+n:]
	return copy(b, frame), nil, nil
}

func (c *rawConn) WriteTo(b []byte, _ net.Addr) (int, error) {
	c.out = append(c.out, slices.Clone(b))
	return len(b), nil
}

func (*rawConn) Close() error { return nil }

func TestParseARP(t *testing.T) {
	const valid = "ffffffffffff" + "0200000000bb" + "0806" + "0001" + "0800" + "0604" + "0001" +
		"0200000000bb" + "c0000209" + "000000000000" + "cb00710a"
	for name, tt := range map[string]struct {
		frame string
		ok    bool
	}{
		"valid":         {valid, true},
		"empty":         {"", false},
		"truncated":     {valid[:60], false},
		"other sizes":   {strings.Replace(valid, "0604", "ff04", 1), false},
		"8 bytes a MAC": {strings.Replace(valid, "0604", "0804", 1) + "00000000", false},
		"IPv6 in ARP":   {valid[:36] + "0610" + valid[40:] + strings.Repeat("00", 32), false},
		"without a MAC": {valid[:36] + "0004" + valid[40:], false},
	} {
		frame := must.Get(hex.DecodeString(tt.frame))(t)
		p, err := parseARP(frame)
		must.True(t, (err == nil) == tt.ok, "%s: %+v, %v; want valid: %t", name, p, err, tt.ok)
	}
}

// Whatever frames a host sends, this node replies only for its own addresses and from its own MAC address.
func FuzzFrames(f *testing.F) {
	vip4, vip6 := netip.MustParseAddr("203.0.113.10"), netip.MustParseAddr("2001:db8::10")
	framed := func(frames ...[]byte) (b []byte) {
		for _, x := range frames {
			b = append(append(b, byte(len(x)>>8), byte(len(x))), x...)
		}
		return b
	}
	request := append(slices.Concat(ethernet.Broadcast, otherMAC, []byte{8, 6, 0, 1, 8, 0, 6, 4, 0, 1}, otherMAC,
		[]byte{192, 0, 2, 9}, make([]byte, 6), vip4.AsSlice()), make([]byte, 18)...)
	probe := slices.Clone(request)
	copy(probe[28:], []byte{0, 0, 0, 0})
	f.Add(framed(request, probe, request[:40]), true)
	for _, from := range []string{"fe80::bb", "::"} {
		group := must.Get(ndp.SolicitedNodeMulticast(vip6))(f)
		s := &ndp.NeighborSolicitation{TargetAddress: vip6, Options: []ndp.Option{ndp.NewNonce()}}
		frame := must.Get(neighbourFrame(s, otherMAC, multicastMAC(group), netip.MustParseAddr(from), group))(f)
		f.Add(framed(frame, frame[:60], frame), false)
	}
	f.Fuzz(func(t *testing.T, b []byte, isARP bool) {
		fake := newFakeSystem()
		_, r, s := serving(t, &lines{}, fake, vip4, vip6)
		conn := &rawConn{in: b}
		if isARP {
			s.arp = arpSocket{conn}
			_ = r.readARP(s)
		} else {
			s.ndp.in = conn
			_ = r.readNDP(s)
		}
		for _, frame := range conn.out {
			p, err := parseARP(frame)
			must.True(t, err == nil && p.SenderIP == vip4 && p.SenderHardwareAddr.String() == ownMAC.String(),
				"sent %x: %+v, %v", frame, p, err)
		}
		for _, text := range fake.take() {
			must.True(t, !strings.Contains(text, " is at ") ||
				strings.Contains(text, vip6.String()+" is at "+ownMAC.String()), "%s", text)
		}
	})
}
