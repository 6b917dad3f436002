package guard

import (
	"bytes"
	"net/netip"
	"slices"
	"strings"
	"testing"
)

// raw returns a message with this type and length, of zeros.
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
		if !bytes.Equal(m.raw, row.b) {
			t.Errorf("%s: %x", row.name, m.raw)
		}
		if m, err = r.next(); err != nil || m.kind != typeKeepalive {
			t.Errorf("%s: then %v, %v", row.name, m.kind, err)
		}
	}
	for _, n := range []int{1, 18} {
		if _, err := newMessageReader(bytes.NewReader(keepalive[:n])).next(); err == nil {
			t.Errorf("%d bytes were read as a message", n)
		}
	}
}

// The text of a NOTIFICATION has its names, and what the peer says about it, without control characters.
func TestErrorText(t *testing.T) {
	received := func(b ...byte) *Error { return parseNotification(b) }
	for _, row := range []struct {
		e    *Error
		want string
	}{
		{received(2, 2), "received NOTIFICATION: bad peer as (code 2, subcode 2)"},
		{received(4, 0), "received NOTIFICATION: hold timer expired (code 4, subcode 0)"},
		{received(6, 99), "received NOTIFICATION: cease (code 6, subcode 99)"},
		{received(99, 0), "received NOTIFICATION: unknown error (code 99, subcode 0)"},
		{received(6, 2, 3, 'b', 'y', 'e'),
			`received NOTIFICATION: administrative shutdown (code 6, subcode 2) "bye"`},
		{received(6, 4, 3, 'b', 27, 'e'),
			`received NOTIFICATION: administrative reset (code 6, subcode 4) "b�e"`},
		{received(6, 2, 4, 0xc2, 0x9b, '2', 'J'), // CSI of C1
			`received NOTIFICATION: administrative shutdown (code 6, subcode 2) "�2J"`},
		{received(6, 2, 9, 'b'), "received NOTIFICATION: administrative shutdown (code 6, subcode 2)"},
		{received(6, 2, 1, 0xff), "received NOTIFICATION: administrative shutdown (code 6, subcode 2)"},
		{protocolError(2, 6, nil, "hold time %d", 1),
			"hold time 1; sent NOTIFICATION: unacceptable hold time (code 2, subcode 6)"},
		{cease(2, ""), "sent NOTIFICATION: administrative shutdown (code 6, subcode 2)"},
	} {
		if got := row.e.Error(); got != row.want {
			t.Errorf("%q, want %q", got, row.want)
		}
	}
	long := cease(ceaseShutdown, strings.Repeat("x", 300))
	m, err := newMessageReader(bytes.NewReader(long.message())).next()
	if err != nil || len(m.body()) != 2+1+255 || m.body()[2] != 255 {
		t.Errorf("a long text: %v, %x", err, m.raw)
	}
	huge := Error{Code: 1, Data: make([]byte, 10_000)}
	if m, err := newMessageReader(bytes.NewReader(huge.message())).next(); err != nil || len(m.raw) != maxMessage {
		t.Errorf("long data: %v, %d bytes", err, len(m.raw))
	}
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
		want string // "": malformed
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
		if got != row.want {
			t.Errorf("%s: %q, want %q", row.name, got, row.want)
		}
	}
	var u Update
	if err := parseUpdate(attrs(reach...), &u); err != nil || u.NextHop != hop || u.Announced[0] != p("2001::/16") {
		t.Errorf("%+v, %v", u, err)
	}
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
