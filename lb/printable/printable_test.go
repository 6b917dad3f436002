package printable

import (
	"encoding/json"
	"strings"
	"testing"
	"unicode"
	"unicode/utf8"

	"github.com/steelyard-lb/steelyard/lb/lbtest/must"
)

func TestText(t *testing.T) {
	for in, want := range map[string]string{
		"":                                 "",
		"HTTP 503, want 200":               "HTTP 503, want 200",
		"\x1b]0;title\a\x1b[1A\r\x1b[2KOK": "�]0;title�[1A �[2KOK",
		" first\n\n\tsecond \n":            "first second",
		"exit status 1: \x00\x00\x00":      "exit status 1: �",
		"\u009b2J \u202egnp.exe\xff":       "�2J �gnp.exe�",
		"Straße 東京 👍":                      "Straße 東京 👍",
	} {
		must.Row(t, in, want, Text(in))
	}
}

func TestCut(t *testing.T) {
	s := strings.Repeat("é", Max)
	must.True(t, Cut(s) == s && Cut(s+"\n") == s, "%d runes are cut", Max)
	got := Cut(strings.Repeat("é", 1<<20))
	must.True(t, got == strings.Repeat("é", Max)+"…", "%d runes", utf8.RuneCountInString(got))
}

// FuzzText: the result is printable, on one line, and not longer than the text. Making it printable again changes
// nothing. JSON keeps every value, and leaves nothing unprintable inside a string.
func FuzzText(f *testing.F) {
	f.Add("\x1b[2J\u009b\U000e0001 \u00a0\xff\n�")
	f.Fuzz(func(t *testing.T, s string) {
		for _, out := range []string{Text(s), Cut(s)} {
			i := strings.IndexFunc(out, func(r rune) bool { return !unicode.IsPrint(r) })
			must.True(t, i < 0, "%q: %q", s, out)
			n := utf8.RuneCountInString(out)
			must.True(t, n <= utf8.RuneCountInString(s) && Text(out) == out, "%q: %q, then %q", s, out, Text(out))
		}
		b := must.Get(json.Marshal(s))(t)
		var was, is string
		must.True(t, json.Unmarshal(b, &was) == nil && json.Unmarshal(JSON(b), &is) == nil && was == is,
			"%q: JSON %q has %q", s, JSON(b), is)
		must.True(t, !strings.ContainsFunc(string(JSON(b)), func(r rune) bool { return !unicode.IsPrint(r) }),
			"%q: JSON %q", s, JSON(b))
	})
}
