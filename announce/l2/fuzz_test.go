package l2

import (
	"encoding/hex"
	"net"
	"net/netip"
	"slices"
	"strings"
	"testing"

	"github.com/mdlayher/ethernet"
	"github.com/mdlayher/ndp"

	"github.com/steelyard-lb/steelyard/lb/lbtest/must"
)

// rawConn reads the frames of a segment, each with its length in the first two bytes, and records what is written.
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
		if p, err := parseARP(frame); (err == nil) != tt.ok {
			t.Errorf("%s: %+v, %v; want valid: %t", name, p, err, tt.ok)
		}
	}
}

// Whatever frames a host sends, this node replies for its own addresses only, and from its own MAC address.
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
			if err != nil || p.SenderIP != vip4 || p.SenderHardwareAddr.String() != ownMAC.String() {
				t.Errorf("sent %x: %+v, %v", frame, p, err)
			}
		}
		for _, text := range fake.take() {
			if strings.Contains(text, " is at ") && !strings.Contains(text, vip6.String()+" is at "+ownMAC.String()) {
				t.Error(text)
			}
		}
	})
}
