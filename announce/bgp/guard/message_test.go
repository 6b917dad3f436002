package guard

import (
	"bytes"
	"errors"
	"net/netip"
	"slices"
	"strings"
	"testing"

	"github.com/steelyard-lb/steelyard/lb/lbtest/must"
)

// raw returns a message of this type and length that is filled with zeros.
func raw(kind byte, length int) []byte {
	b := encode(messageType(kind), make([]byte, max(length-headerLen, 0)))
	b[16], b[17] = byte(length>>8), byte(length)
	return b
}

func TestReader(t *testing.T) {
	noMarker := bytes.Clone(keepalive)
	noMarker[15] = 0xfe
	for _, row := range []struct {
		name          string
		b             []byte
		code, subcode uint8
	}{
		{"KEEPALIVE", keepalive, 0, 0},
		{"no marker", noMarker, 1, 1},
		{"type 0", raw(0, 19), 1, 3}, {"type 6", raw(6, 23), 1, 3},
		{"length 0", raw(4, 0), 1, 2}, {"length 18", raw(4, 18), 1, 2}, {"length 65535", raw(2, 65535)[:100], 1, 2},
		{"KEEPALIVE of 20 bytes", raw(4, 20), 1, 2},
		{"OPEN of 28 bytes", raw(1, 28), 1, 2}, {"OPEN of 29 bytes", raw(1, 29), 0, 0},
		{"UPDATE of 22 bytes", raw(2, 22), 1, 2}, {"UPDATE of 23 bytes", raw(2, 23), 0, 0},
		{"UPDATE of 4096 bytes", raw(2, 4096), 0, 0}, {"UPDATE of 4097 bytes", raw(2, 4097), 1, 2},
		{"NOTIFICATION of 20 bytes", raw(3, 20), 1, 2}, {"NOTIFICATION of 21 bytes", raw(3, 21), 0, 0},
		{"ROUTE-REFRESH of 22 bytes", raw(5, 22), 1, 2}, {"ROUTE-REFRESH of 23 bytes", raw(5, 23), 0, 0},
	} {
		r := newMessageReader(bytes.NewReader(slices.Concat(row.b, keepalive)))
		m, err := r.next()
		wantError(t, row.name, err, row.code, row.subcode)
		if row.code > 0 {
			continue
		}
		must.True(t, bytes.Equal(m.raw, row.b), "%s: %x", row.name, m.raw)
		m, err = r.next()
		must.True(t, err == nil && m.kind == typeKeepalive, "%s: then %v, %v", row.name, m.kind, err)
	}
	for _, n := range []int{1, 18} {
		_, err := newMessageReader(bytes.NewReader(keepalive[:n])).next()
		must.True(t, err != nil, "%d bytes were read as a message", n)
	}
}

// The text of a NOTIFICATION contains its names and the peer's message, without control characters.
func TestErrorText(t *testing.T) {
	received := func(b ...byte) *Error { return parseNotification(b) }
	for _, row := range []struct {
		e    *Error
		want string
	}{
		{received(2, 2), "received NOTIFICATION: bad peer as (code 2, subcode 2): " +
			"the peer expects an AS number other than asn or local_asn here"},
		{received(4, 0), "received NOTIFICATION: hold timer expired (code 4, subcode 0)"},
		{received(6, 99), "received NOTIFICATION: cease (code 6, subcode 99)"},
		{received(99, 0), "received NOTIFICATION: unknown error (code 99, subcode 0)"},
		{received(6, 2, 3, 'b', 'y', 'e'),
			`received NOTIFICATION: administrative shutdown (code 6, subcode 2) "bye"`},
		{received(6, 4, 3, 'b', 27, 'e'),
			`received NOTIFICATION: administrative reset (code 6, subcode 4) "b�e"`},
		{received(6, 2, 4, 0xc2, 0x9b, '2', 'J'), // CSI, a C1 control character
			`received NOTIFICATION: administrative shutdown (code 6, subcode 2) "�2J"`},
		{received(6, 2, 9, 'b'), "received NOTIFICATION: administrative shutdown (code 6, subcode 2)"},
		{received(6, 2, 1, 0xff), "received NOTIFICATION: administrative shutdown (code 6, subcode 2)"},
		{protocolError(2, 6, nil, "hold time %d", 1),
			"hold time 1; sent NOTIFICATION: unacceptable hold time (code 2, subcode 6)"},
		{cease(2, ""), "sent NOTIFICATION: administrative shutdown (code 6, subcode 2)"},
	} {
		got := row.e.Error()
		must.True(t, got == row.want, "%q, want %q", got, row.want)
	}
	long := cease(ceaseShutdown, strings.Repeat("x", 300))
	m, err := newMessageReader(bytes.NewReader(long.message())).next()
	must.True(t, err == nil && len(m.body()) == 2+1+255 && m.body()[2] == 255, "a long text: %v, %x", err, m.raw)
	huge := Error{Code: 1, Data: make([]byte, 10_000)}
	m, err = newMessageReader(bytes.NewReader(huge.message())).next()
	must.True(t, err == nil && len(m.raw) == maxMessage, "long data: %v, %d bytes", err, len(m.raw))
}

func TestParseUpdate(t *testing.T) {
	p := netip.MustParsePrefix
	v4, v6 := []byte{24, 203, 0, 113}, []byte{16, 0x20, 0x01}
	attrs := func(b ...byte) []byte { return append([]byte{0, 0, 0, byte(len(b))}, b...) }
	hop := netip.MustParseAddr("2001:db8::1")
	reach := slices.Concat([]byte{0x80, 14, 24, 0, 2, 1, 16}, hop.AsSlice(), []byte{0}, v6)
	for _, row := range []struct {
		name string
		body []byte
		want string // "" if malformed
	}{
		{"End-of-RIB of IPv4", []byte{0, 0, 0, 0}, "+[] -[] eor4"},
		{"End-of-RIB of IPv6", attrs(0x80, 15, 3, 0, 2, 1), "+[] -[] eor6"},
		{"End-of-RIB of IPv4, multiprotocol", attrs(0x80, 15, 3, 0, 1, 1), "+[] -[] eor4"},
		{"not alone", attrs(0x80, 15, 3, 0, 2, 1, 0x40, 1, 1, 0), "+[] -[]"},
		{"announced", append(attrs(0x40, 1, 1, 0), v4...), "+[203.0.113.0/24] -[]"},
		{"withdrawn", append(append([]byte{0, 4}, v4...), 0, 0), "+[] -[203.0.113.0/24]"},
		{"announced IPv6", attrs(reach...), "+[2001::/16] -[]"},
		{"withdrawn IPv6", attrs(append([]byte{0x80, 15, 6, 0, 2, 1}, v6...)...), "+[] -[2001::/16]"},
		{"extended length", attrs(0x90, 15, 0, 3, 0, 2, 1), "+[] -[] eor6"},
		{"other family", attrs(0x80, 15, 3, 0, 2, 128), "+[] -[] other"},
		{"host bits", append(attrs(), 8, 10, 1)[:4+2], "+[10.0.0.0/8] -[]"},
		{"default", append(attrs(), 0), "+[0.0.0.0/0] -[]"},
		{"short", []byte{0, 0, 0}, ""}, {"withdrawn beyond the end", []byte{0, 9, 0, 0}, ""},
		{"attributes beyond the end", []byte{0, 0, 0, 9}, ""}, {"/33", append(attrs(), 33, 1, 2, 3, 4, 5), ""},
		{"prefix beyond the end", append(attrs(), 24, 1, 2), ""},
		{"attribute of 2 bytes", attrs(0x40, 1), ""}, {"attribute beyond the end", attrs(0x40, 1, 9), ""},
		{"extended, 3 bytes", attrs(0x50, 1, 0), ""}, {"short MP_UNREACH", attrs(0x80, 15, 2, 0, 2), ""},
		{"short MP_REACH", attrs(0x80, 14, 4, 0, 2, 1, 0), ""},
		{"next hop beyond the end", attrs(0x80, 14, 5, 0, 2, 1, 16, 0), ""},
	} {
		var u Update
		err := parseUpdate(row.body, &u)
		got := ""
		if err == nil {
			got = "+" + join(u.Announced) + " -" + join(u.Withdrawn)
			for on, text := range map[string]bool{" eor4": u.EndOfRIB4, " eor6": u.EndOfRIB6, " other": u.other} {
				if text {
					got += on
				}
			}
		}
		must.Row(t, row.name, row.want, got)
	}
	var u Update
	must.Do(t, parseUpdate(attrs(reach...), &u))
	must.True(t, u.NextHop == hop && u.Announced[0] == p("2001::/16"), "%+v", u)
}

func join(list []netip.Prefix) string {
	text := "["
	for i, p := range list {
		if i > 0 {
			text += " "
		}
		text += p.String()
	}
	return text + "]"
}

func testOpen() Open {
	return Open{
		ASN: 64512, HoldTime: 9, ID: netip.MustParseAddr("192.0.2.11"), V4: true, V6: true, FourOctetAS: true,
		RouteRefresh: true,
	}
}

// An encoded OPEN parses to the same OPEN.
func TestOpenRoundTrip(t *testing.T) {
	for name, change := range map[string]func(*Open){
		"all":             func(*Open) {},
		"IPv4":            func(o *Open) { o.V6 = false },
		"IPv6":            func(o *Open) { o.V4 = false },
		"AS of 2 bytes":   func(o *Open) { o.FourOctetAS = false },
		"AS of 4 bytes":   func(o *Open) { o.ASN = 4200000000 },
		"extended":        func(o *Open) { o.ExtendedNextHop = true },
		"no hold time":    func(o *Open) { o.HoldTime = 0 },
		"restarting":      func(o *Open) { o.GracefulRestart, o.RestartTime, o.Restarted = true, 4095, true },
		"not restarting":  func(o *Open) { o.GracefulRestart, o.RestartTime = true, 30 },
		"no restart time": func(o *Open) { o.GracefulRestart = true },
		"long-lived":      func(o *Open) { o.GracefulRestart, o.LongLivedAware = true, true },
	} {
		want := testOpen()
		change(&want)
		withName := want
		withName.Hostname, withName.Forwarded = "balancer", true
		b := withName.message()
		got, err := parseOpen(b[headerLen:])
		must.True(t, err == nil && *got == want, "%s: %+v, %v, want %+v", name, got, err, want)
		must.True(t, len(b) <= maxMessage && b[headerLen+9] == byte(len(b)-headerLen-10), "%s: %x", name, b)
	}
}

func body(params ...byte) []byte {
	return append([]byte{4, 0xfc, 0, 0, 9, 192, 0, 2, 1, byte(len(params))}, params...)
}

// wantError checks a protocol error's code and subcode, or that there is none if code is 0.
func wantError(t *testing.T, name string, err error, code, subcode uint8) {
	t.Helper()
	var e *Error
	if code == 0 && err != nil || code != 0 && (!errors.As(err, &e) || e.Code != code || e.Subcode != subcode) {
		t.Errorf("%s: error %v, want code %d, subcode %d", name, err, code, subcode)
	}
}

func TestParseOpenErrors(t *testing.T) {
	wide := func(params ...byte) []byte { // RFC 9072
		b := body()
		b[9] = 255
		return append(append(b, 255, byte(len(params)>>8), byte(len(params))), params...)
	}
	for _, row := range []struct {
		name          string
		body          []byte
		code, subcode uint8
	}{
		{"no parameters", body(), 0, 0},
		{"version 3", append([]byte{3}, body()[1:]...), 2, 1},
		{"version 5", append([]byte{5}, body()[1:]...), 2, 1},
		{"parameters beyond the end", append(body(), 2, 0)[:10+1], 2, 0},
		{"bytes after the parameters", append(body(), 1), 2, 0},
		{"parameter of one byte", body(2), 2, 0},
		{"parameter beyond the end", body(2, 3, 1, 0), 2, 0},
		{"authentication (RFC 1771)", body(1, 1, 0), 2, 4},
		{"unknown parameter", body(9, 0), 2, 4},
		{"empty capabilities", body(2, 0), 0, 0},
		{"capability of one byte", body(2, 1, 2), 2, 0},
		{"capability beyond the end", body(2, 3, 65, 4, 0), 2, 0},
		{"unknown capability", body(2, 3, 200, 1, 0), 0, 0},
		{"multiprotocol of 3 bytes", body(2, 5, 1, 3, 0, 1, 0), 2, 0},
		{"multiprotocol of 5 bytes", body(2, 7, 1, 5, 0, 1, 0, 1, 0), 2, 0},
		{"AS of 2 bytes", body(2, 4, 65, 2, 0, 1), 2, 0},
		{"graceful restart of 1 byte", body(2, 3, 64, 1, 0), 2, 0},
		{"graceful restart of 3 bytes", body(2, 5, 64, 3, 0, 0, 0), 2, 0},
		{"two parameters", body(2, 2, 2, 0, 2, 6, 1, 4, 0, 1, 0, 1), 0, 0},
		{"wide", wide(2, 0, 6, 1, 4, 0, 1, 0, 1), 0, 0},
		{"wide, truncated head", wide(2, 0), 2, 0},
		{"wide, truncated", wide(2, 0, 7, 1, 4, 0, 1, 0, 1), 2, 0},
		{"wide, wrong length", append(wide(2, 0, 0), 0), 2, 0},
	} {
		_, err := parseOpen(row.body)
		wantError(t, row.name, err, row.code, row.subcode)
	}
}

func TestFamilies(t *testing.T) {
	for _, row := range []struct {
		name   string
		body   []byte
		v4, v6 bool
	}{
		{"no capability", body(), true, false},
		{"IPv4", body(2, 6, 1, 4, 0, 1, 0, 1), true, false},
		{"IPv6", body(2, 6, 1, 4, 0, 2, 0, 1), false, true},
		{"both", body(2, 12, 1, 4, 0, 2, 0, 1, 1, 4, 0, 1, 0, 1), true, true},
		{"IPv4 multicast", body(2, 6, 1, 4, 0, 1, 0, 2), false, false},
		{"AFI 258", body(2, 6, 1, 4, 1, 2, 0, 1), false, false},
	} {
		o, err := parseOpen(row.body)
		must.True(t, err == nil && o.V4 == row.v4 && o.V6 == row.v6, "%s: %+v, %v", row.name, o, err)
	}
}

func TestCheck(t *testing.T) {
	ours := testOpen()
	for _, row := range []struct {
		name          string
		change        func(*Open)
		expected      uint32
		code, subcode uint8
	}{
		{"external", func(*Open) {}, 64500, 0, 0},
		{"any external", func(o *Open) { o.ASN = 4200000000 }, 0, 0, 0},
		{"any external, but ours", func(o *Open) { o.ASN = ours.ASN }, 0, 2, 2},
		{"any external, AS 0", func(o *Open) { o.ASN = 0 }, 0, 2, 2},
		{"any external, AS_TRANS", func(o *Open) { o.ASN = 23456 }, 0, 2, 2},
		{"no hold time", func(o *Open) { o.HoldTime = 0 }, 64500, 0, 0},
		{"hold time 1", func(o *Open) { o.HoldTime = 1 }, 64500, 2, 6},
		{"hold time 2", func(o *Open) { o.HoldTime = 2 }, 64500, 2, 6},
		{"hold time 3", func(o *Open) { o.HoldTime = 3 }, 64500, 0, 0},
		{"other AS", func(o *Open) { o.ASN = 64501 }, 64500, 2, 2},
		{"no identifier", func(o *Open) { o.ID = netip.IPv4Unspecified() }, 64500, 2, 3},
		{"our identifier, external", func(o *Open) { o.ID = ours.ID }, 64500, 0, 0}, // RFC 6286
		{"our identifier, internal", func(o *Open) { o.ID, o.ASN = ours.ID, 64512 }, 64512, 2, 3},
		{"no family", func(o *Open) { o.V4, o.V6 = false, false }, 64500, 2, 7},
	} {
		o := testOpen()
		o.ASN, o.ID = 64500, netip.MustParseAddr("192.0.2.1")
		row.change(&o)
		wantError(t, row.name, o.check(&ours, row.expected), row.code, row.subcode)
	}
}

// The connection from the side with the higher identifier wins (RFC 4271, section 6.8; RFC 6286, section 2.3).
func TestWins(t *testing.T) {
	for _, row := range []struct {
		ours, theirs string
		asn          uint32
		outgoing     bool
	}{
		{"192.0.2.2", "192.0.2.1", 64500, true}, {"192.0.2.1", "192.0.2.2", 64500, false},
		{"10.0.0.1", "9.255.255.255", 64500, true}, {"192.0.2.1", "192.0.2.1", 64500, true},
		{"192.0.2.1", "192.0.2.1", 64599, false},
	} {
		for _, outgoing := range []bool{false, true} {
			c := conn{outgoing: outgoing, ours: testOpen(), theirs: &Open{ASN: row.asn}}
			c.ours.ID, c.theirs.ID = netip.MustParseAddr(row.ours), netip.MustParseAddr(row.theirs)
			got := c.wins()
			must.True(t, got == (outgoing == row.outgoing), "%+v, outgoing %t: wins: %t", row, outgoing, got)
		}
	}
}
