package bgp

import (
	"bytes"
	"net"
	"net/netip"
	"testing"
	"time"

	"github.com/osrg/gobgp/v3/pkg/packet/bgp"
)

func TestTTL(t *testing.T) {
	for _, row := range []struct {
		peer Peer
		want int
	}{
		{Peer{ASN: 64500}, 1}, {Peer{ASN: 64500, Multihop: 1}, 1}, {Peer{ASN: 64500, Multihop: 3}, 3},
		{Peer{ASN: 64512}, 0}, {Peer{ASN: 64512, Multihop: 3}, 0},
		{Peer{ASN: 64500, TTLSecurity: true}, 255}, {Peer{ASN: 64512, TTLSecurity: true}, 255},
	} {
		if got := row.peer.ttl(64512); got != row.want {
			t.Errorf("%+v: TTL %d, want %d", row.peer, got, row.want)
		}
	}
}

func TestOpenMessage(t *testing.T) {
	for asn, want := range map[uint32]uint16{64512: 64512, 65535: 65535, 65536: bgp.AS_TRANS} {
		o := Options{ASN: asn, RouterID: netip.MustParseAddr("192.0.2.11")}
		open := o.openMessage(Peer{HoldTime: 9 * time.Second}).Body.(*bgp.BGPOpen)
		if open.MyAS != want || open.HoldTime != 9 || open.ID.String() != "192.0.2.11" || open.Version != 4 {
			t.Errorf("ASN %d: %+v, want AS %d", asn, open, want)
		}
		if caps := open.OptParams[0].(*bgp.OptionParameterCapability).Capability; len(caps) != 3 {
			t.Errorf("capabilities %v", caps)
		}
	}
}

func TestMD5Key(t *testing.T) {
	for addr, at := range map[string]int{"192.0.2.1": 2, "2001:db8::1": 6} {
		a := netip.MustParseAddr(addr)
		sig := md5Key(Peer{Address: a, Password: "secret"})
		if !bytes.Equal(sig.Addr.Data[at:at+a.BitLen()/8], a.AsSlice()) {
			t.Errorf("%s: address %x", addr, sig.Addr.Data[:32])
		}
		if sig.Keylen != 6 || !bytes.HasPrefix(sig.Key[:], []byte("secret\x00")) {
			t.Errorf("%s: key of %d bytes, %x", addr, sig.Keylen, sig.Key[:8])
		}
	}
}

func TestReadMessage(t *testing.T) {
	valid, err := bgp.NewBGPKeepAliveMessage().Serialize()
	if err != nil {
		t.Fatal(err)
	}
	header := func(length uint16) []byte {
		b := bytes.Clone(valid)
		b[16], b[17] = byte(length>>8), byte(length)
		return b
	}
	for _, row := range []struct {
		name string
		b    []byte
		err  string
	}{
		{"keepalive", valid, ""},
		{"truncated header", valid[:18], "unexpected EOF"},
		{"length 18", header(18), "unknown message type"},
		{"length 4097", header(4097), "message of 4097 bytes"},
		{"truncated body", header(4096), "EOF"},
	} {
		_, err := readMessage(bytes.NewReader(row.b))
		if text := errText(err); text != row.err {
			t.Errorf("%s: error %q, want %q", row.name, text, row.err)
		}
	}
}

// The probe returns the text of a NOTIFICATION, and "" when the OPEN is accepted or nothing is received.
func TestProbeNotification(t *testing.T) {
	const (
		bad  = "received NOTIFICATION: code 2(open) subcode 2(bad peer as)"
		none = ""
	)
	o := Options{ASN: 64512, RouterID: netip.MustParseAddr("192.0.2.11")}
	open := o.openMessage(Peer{HoldTime: 9 * time.Second})
	keepalive := bgp.NewBGPKeepAliveMessage()
	refusal := bgp.NewBGPNotificationMessage(bgp.BGP_ERROR_OPEN_MESSAGE_ERROR, bgp.BGP_ERROR_SUB_BAD_PEER_AS, nil)
	for _, row := range []struct {
		name string
		send []*bgp.BGPMessage
		want string
	}{
		{"refused", []*bgp.BGPMessage{refusal}, bad},
		{"refused after an OPEN", []*bgp.BGPMessage{open, refusal}, bad},
		{"accepted", []*bgp.BGPMessage{open, keepalive}, none},
		{"accepted, then refused", []*bgp.BGPMessage{keepalive, refusal}, none},
		{"refused too late", []*bgp.BGPMessage{open, open, refusal}, none},
		{"closed", nil, none},
	} {
		l, err := net.Listen("tcp", "127.0.0.1:0")
		if err != nil {
			t.Fatal(err)
		}
		go func() {
			c, err := l.Accept()
			if err != nil {
				return
			}
			defer c.Close()
			if m, err := readMessage(c); err != nil || m.Header.Type != bgp.BGP_MSG_OPEN {
				t.Errorf("%s: received %+v, %v, want an OPEN", row.name, m, err)
			}
			for _, m := range row.send {
				b, _ := m.Serialize()
				c.Write(b)
			}
		}()
		at := l.Addr().(*net.TCPAddr).AddrPort()
		p := Peer{Address: at.Addr(), Port: at.Port(), ASN: 64500, HoldTime: 9 * time.Second, Source: at.Addr()}
		if got := o.probeNotification(t.Context(), p); got != row.want {
			t.Errorf("%s: %q, want %q", row.name, got, row.want)
		}
		l.Close()
		if got := o.probeNotification(t.Context(), p); got != "" {
			t.Errorf("%s: %q from a closed port", row.name, got)
		}
	}
}

// respond returns the address of a listener that responds to one OPEN with m.
func respond(t *testing.T, m *bgp.BGPMessage) netip.AddrPort {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { l.Close() })
	go func() {
		c, err := l.Accept()
		if err != nil {
			return
		}
		defer c.Close()
		if _, err := readMessage(c); err == nil {
			b, _ := m.Serialize()
			c.Write(b)
		}
	}()
	return l.Addr().(*net.TCPAddr).AddrPort()
}
