package checksum

import "testing"

func TestInternet(t *testing.T) {
	for _, tt := range []struct {
		name  string
		parts [][]byte
		want  uint16
	}{
		{"nothing", nil, 0xffff},
		{"example of RFC 1071 §3", [][]byte{{0x00, 0x01, 0xf2, 0x03, 0xf4, 0xf5, 0xf6, 0xf7}}, ^uint16(0xddf2)},
		{"the same in parts", [][]byte{{0x00, 0x01}, {0xf2, 0x03, 0xf4, 0xf5}, {}, {0xf6, 0xf7}}, ^uint16(0xddf2)},
		{"odd length is padded with zero", [][]byte{{0x12, 0x34, 0x56}}, ^uint16(0x1234 + 0x5600)},
		{"carry of a carry", [][]byte{{0xff, 0xff, 0xff, 0xff, 0x00, 0x01}}, ^uint16(1)},
		{"contains its checksum", [][]byte{{0x00, 0x01, 0xf2, 0x03, 0xf4, 0xf5, 0xf6, 0xf7}, {0x22, 0x0d}}, 0},
	} {
		if got := Internet(tt.parts...); got != tt.want {
			t.Errorf("%s: %#04x; want %#04x", tt.name, got, tt.want)
		}
	}
}
