// Package printable bounds text from outside: from servers, certificates, check programs, tenants, BGP peers and
// members. Such text reaches logs, the API and terminals, where an escape sequence would move the cursor, and a
// megabyte would fill a disk.
//
// Text is cut where it enters the agent (Cut), and made printable once more where it is printed (Text, JSON).
package printable

import (
	"fmt"
	"strings"
	"unicode"
	"unicode/utf16"
	"unicode/utf8"
)

// Max is the number of runes that Cut keeps.
const Max = 200

// Cut returns the first Max runes of Text(s), with "…" instead of the rest.
func Cut(s string) string { return text(s, Max) }

// Text returns s on one line and printable (unicode.IsPrint). White space becomes a space, and everything else that is
// not printable becomes "�", such as control characters, invalid UTF-8 and marks that change the direction of writing.
// A run of them becomes one.
func Text(s string) string { return text(s, len(s)) }

func text(s string, most int) string {
	var b strings.Builder
	n, last, space := 0, ' ', false
	for _, r := range s {
		if unicode.IsSpace(r) {
			space = n > 0
			continue
		}
		if !unicode.IsPrint(r) {
			r = unicode.ReplacementChar
		}
		next := string(r)
		switch {
		case space:
			next = " " + next
		case r == unicode.ReplacementChar && r == last:
			continue
		}
		if n += utf8.RuneCountInString(next); n > most {
			return b.String() + "…"
		}
		b.WriteString(next)
		last, space = r, false
	}
	return b.String()
}

// JSON returns the JSON text b with everything escaped that is not printable but that encoding/json leaves as it is,
// such as U+009B, which begins an escape sequence on some terminals. White space between values stays.
func JSON(b []byte) []byte {
	out := make([]byte, 0, len(b))
	for _, r := range string(b) {
		switch {
		case r < 0x7f || unicode.IsPrint(r): // encoding/json escapes the ASCII control characters except DEL
			out = append(out, string(r)...)
		case r > 0xffff:
			high, low := utf16.EncodeRune(r)
			out = fmt.Appendf(out, `\u%04x\u%04x`, high, low)
		default:
			out = fmt.Appendf(out, `\u%04x`, r)
		}
	}
	return out
}
