package guard

import (
	"errors"
	"net/netip"
	"testing"
)

func testOpen() Open {
	return Open{
		ASN: 64512, HoldTime: 9, ID: netip.MustParseAddr("192.0.2.11"), V4: true, V6: true, FourOctetAS: true,
		RouteRefresh: true,
	}
}

// An OPEN that is encoded is read as the same.
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
		if got, err := parseOpen(b[headerLen:]); err != nil || *got != want {
			t.Errorf("%s: %+v, %v, want %+v", name, got, err, want)
		}
		if len(b) > maxMessage || b[headerLen+9] != byte(len(b)-headerLen-10) {
			t.Errorf("%s: %x", name, b)
		}
	}
}

// body returns the body of an OPEN with these optional parameters.
func body(params ...byte) []byte {
	return append([]byte{4, 0xfc, 0, 0, 9, 192, 0, 2, 1, byte(len(params))}, params...)
}

// wantError checks the code and the subcode of a protocol error; code 0: none.
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
		if err != nil || o.V4 != row.v4 || o.V6 != row.v6 {
			t.Errorf("%s: %+v, %v", row.name, o, err)
		}
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

// The connection of the side with the higher identifier is kept (RFC 4271, section 6.8; RFC 6286, section 2.3).
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
			if got := c.wins(); got != (outgoing == row.outgoing) {
				t.Errorf("%+v, outgoing %t: wins: %t", row, outgoing, got)
			}
		}
	}
}
