package bfd

import (
	"bytes"
	"strings"
	"testing"
	"time"
)

var sample = Packet{
	State: Up, Diag: DiagTimeExpired, Poll: true, Independent: true, Multiplier: 3, MyDiscriminator: 0x01020304,
	YourDiscriminator: 0x05060708, DesiredMinTx: 100 * time.Millisecond, RequiredMinRx: 300 * time.Millisecond,
	RequiredMinEchoRx: 50 * time.Microsecond,
}

// The bytes are written down here: a decoder that only agrees with its encoder would prove nothing.
var sampleBytes = []byte{
	0x21, 0xe8, 3, 24, 1, 2, 3, 4, 5, 6, 7, 8, 0, 1, 0x86, 0xa0, 0, 4, 0x93, 0xe0, 0, 0, 0, 50,
}

func TestPacketOnTheWire(t *testing.T) {
	if got := sample.Append(nil); !bytes.Equal(got, sampleBytes) {
		t.Errorf("Append: % x, want % x", got, sampleBytes)
	}
	if got, err := Parse(append(bytes.Clone(sampleBytes), 1, 2, 3)); err != nil || got != sample {
		t.Errorf("Parse: %+v, %v, want %+v", got, err, sample)
	}
	p := Packet{State: Down, Final: true, Demand: true, Multiplier: 1, MyDiscriminator: 1}
	if got, err := Parse(p.Append(nil)); err != nil || got != p {
		t.Errorf("Parse: %+v, %v, want %+v", got, err, p)
	}
}

func TestParseRefuses(t *testing.T) {
	for name, c := range map[string]struct {
		at    int
		value byte
		want  string
	}{
		"version 0":                        {0, 0x01, "version 0"},
		"version 2":                        {0, 0x41, "version 2"},
		"length below the header":          {3, 23, "length 23"},
		"length beyond the datagram":       {3, 25, "length 25"},
		"authentication":                   {1, 0xec, "authentication"},
		"multipoint":                       {1, 0xe9, "multipoint"},
		"multiplier 0":                     {2, 0, "multiplier"},
		"up without a discriminator of us": {1, 0xc8, ""},
	} {
		b := bytes.Clone(sampleBytes)
		b[c.at] = c.value
		_, err := Parse(b)
		if c.want == "" && err != nil || c.want != "" && (err == nil || !strings.Contains(err.Error(), c.want)) {
			t.Errorf("%s: error %v, want %q", name, err, c.want)
		}
	}
	for name, clear := range map[string][2]int{
		"the sender's discriminator": {4, 8}, "without the receiver's": {8, 12},
	} {
		b := bytes.Clone(sampleBytes)
		copy(b[clear[0]:clear[1]], make([]byte, 4))
		if _, err := Parse(b); err == nil || !strings.Contains(err.Error(), name) {
			t.Errorf("%s: error %v", name, err)
		}
	}
	if _, err := Parse(sampleBytes[:23]); err == nil {
		t.Error("23 bytes were parsed")
	}
}

func FuzzParse(f *testing.F) {
	f.Add(sampleBytes)
	f.Fuzz(func(t *testing.T, b []byte) {
		p, err := Parse(b)
		if err != nil {
			return
		}
		again, err := Parse(p.Append(nil))
		if err != nil || again != p {
			t.Errorf("%+v becomes %+v, %v", p, again, err)
		}
	})
}
