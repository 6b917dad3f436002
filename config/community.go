package config

import (
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"
)

// Community is a BGP community: standard (RFC 1997), large (RFC 8092) or extended (RFC 4360). Compare them with ==.
type Community struct {
	kind     communityKind
	parts    [3]uint32 // for a standard community, only the first is set
	extended [8]byte
}

type communityKind uint8

const (
	standard communityKind = iota
	large
	extended
)

// wellKnown maps names to standard communities (IANA "BGP Well-known Communities").
var wellKnown = map[string]uint32{
	"graceful-shutdown":   0xffff0000, // RFC 8326
	"accept-own":          0xffff0001, // RFC 7611
	"no-llgr":             0xffff0007, // RFC 9494
	"blackhole":           0xffff029a, // RFC 7999
	"no-export":           0xffffff01, // RFC 1997
	"no-advertise":        0xffffff02, // RFC 1997
	"no-export-subconfed": 0xffffff03, // RFC 1997
	"no-peer":             0xffffff04, // RFC 3765
}

// Standard returns the value of a standard community, or false if c is another kind.
func (c Community) Standard() (uint32, bool) { return c.parts[0], c.kind == standard }

// Large returns the three parts of a large community, or false if c is another kind.
func (c Community) Large() ([3]uint32, bool) { return c.parts, c.kind == large }

// Extended returns the bytes of an extended community, or false if c is another kind.
func (c Community) Extended() ([8]byte, bool) { return c.extended, c.kind == extended }

// String returns the form that ParseCommunity reads: "64512:100", "64512:1:2", "rt:64512:100" or "no-export".
func (c Community) String() string {
	if c.kind == extended {
		return extendedText(c.extended)
	}
	if c.kind == large {
		return fmt.Sprintf("%d:%d:%d", c.parts[0], c.parts[1], c.parts[2])
	}
	for name, value := range wellKnown {
		if value == c.parts[0] {
			return name
		}
	}
	return fmt.Sprintf("%d:%d", c.parts[0]>>16, c.parts[0]&0xffff)
}

// MarshalText returns String.
func (c Community) MarshalText() ([]byte, error) { return []byte(c.String()), nil }

// UnmarshalText calls ParseCommunity.
func (c *Community) UnmarshalText(b []byte) (err error) {
	*c, err = ParseCommunity(string(b))
	return err
}

// ParseCommunity reads "64512:100" (two numbers up to 65535), "64512:1:2" (three numbers up to 4294967295), "rt:…" and
// "soo:…" (parseExtended), or a well-known name.
func ParseCommunity(s string) (Community, error) {
	if value, ok := wellKnown[s]; ok {
		return Community{parts: [3]uint32{value}}, nil
	}
	if kind, value, ok := strings.Cut(s, ":"); ok && subtypes[kind] != 0 {
		return parseExtended(s, subtypes[kind], value)
	}
	var c Community
	fields := strings.Split(s, ":")
	if len(fields) == 3 {
		c.kind = large
	} else if len(fields) != 2 {
		return Community{}, fmt.Errorf("unknown community %q", s)
	}
	bits := 16
	if c.kind == large {
		bits = 32
	}
	for i, f := range fields {
		n, err := strconv.ParseUint(f, 10, bits)
		if err != nil {
			return Community{}, fmt.Errorf("%q in community %q is not a number from 0 to %d", f, s, uint64(1)<<bits-1)
		}
		c.parts[i] = uint32(n)
	}
	if c.kind == standard {
		c.parts = [3]uint32{c.parts[0]<<16 | c.parts[1]}
	}
	return c, nil
}

func (i item) community() (Community, bool) {
	s, ok := i.str("64512:100")
	if !ok {
		return Community{}, false
	}
	c, err := ParseCommunity(s)
	if err != nil {
		names := slices.Sorted(maps.Keys(wellKnown))
		hint := `write "64512:100", a large one like "64512:1:2", an extended one like "rt:64512:100", or one of ` +
			strings.Join(names, ", ")
		if name := suggest(s, names); name != "" {
			hint = "did you mean " + name + "?"
		}
		i.errorf(hint, "%v", err)
		return Community{}, false
	}
	return c, true
}
