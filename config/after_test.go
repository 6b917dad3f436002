package config

import (
	"fmt"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/steelyard-lb/steelyard/lb/lbtest/must"
)

// afterBase has services in all positions that split must recognise, and one with a warning.
const afterBase = `force = ""
[node]
address = "192.0.2.1"
[[pool]]
name = "public"
addresses = ["203.0.113.0/24"]
[[service]]
name = "a"
address = "203.0.113.1"
ports = ["80"]
backends = ["10.0.0.1"]
[service.check]
type = "tcp"
[[service]]
name = "b" # comment
pool = "public"
ports = ["80", "443"]
  [[service.backends]]
  address = "10.0.0.2"
  [[service.backends]]
  address = "10.0.0.3"
[log]
level = "debug"
[[service]]
name = "c"
address = "203.0.113.3"
ports = ["53/udp"]
backends = [
 "10.0.0.4",
]
snat = true
forward = "dsr"
check = "none"
[[service]]
name = "d"
address = "203.0.113.4"
ports = ["80"]
backends = ["10.0.0.5"]
`

// ParseAfter returns what Parse returns, including errors and warnings with their lines.
func sameAfter(t *testing.T, before *Config, text string) {
	t.Helper()
	rule := func(c *Config, r *Report) {
		for n := range c.Services {
			r.Warnf(KeyOf("service", n, "ports"), "", "%s", c.Services[n].Name)
		}
	}
	want, wantErr := Parse("a.toml", []byte(text), rule)
	got, err := ParseAfter(before, "a.toml", []byte(text), rule)
	must.Equal(t, fmt.Sprint(wantErr), fmt.Sprint(err))
	must.Equal(t, want, got, cmp.AllowUnexported(Config{}, Secret{}))
}

// Only services whose text differs are decoded again, and those with warnings.
func TestParseAfterDecodesOnlyChangedServices(t *testing.T) {
	t.Parallel()
	before := must.Get(Parse("a.toml", []byte(afterBase)))(t)
	text := strings.Replace(afterBase, "10.0.0.5", "10.0.0.6", 1)
	after := must.Get(ParseAfter(before, "a.toml", []byte(text)))(t)
	var kept []string
	for n := range after.Services {
		if &after.Services[n].Backends[0] == &before.Services[n].Backends[0] {
			kept = append(kept, after.Services[n].Name)
		}
	}
	must.Equal(t, []string{"a", "b"}, kept) // c has a warning
	sameAfter(t, before, text)
}

func TestParseAfter(t *testing.T) {
	t.Parallel()
	before := must.Get(Parse("a.toml", []byte(afterBase)))(t)
	service := "[[service]]\nname = %q\naddress = \"203.0.113.9\"\nports = [\"80\"]\nbackends = [\"10.0.0.9\"]\n"
	replace := func(old, with string) string { return strings.Replace(afterBase, old, with, 1) }
	for name, text := range map[string]string{
		"equal":                           afterBase,
		"added":                           afterBase + fmt.Sprintf(service, "e"),
		"added first":                     replace("[[service]]", fmt.Sprintf(service, "e")+"[[service]]"),
		"added with a used name":          afterBase + fmt.Sprintf(service, "a"),
		"added before one with its name":  replace("[[service]]", fmt.Sprintf(service, "d")+"[[service]]"),
		"twice":                           afterBase + afterBase[strings.LastIndex(afterBase, "[[service]]"):],
		"with a used frontend":            replace("203.0.113.4", "203.0.113.1"),
		"removed":                         afterBase[:strings.LastIndex(afterBase, "[[service]]")],
		"all removed":                     afterBase[:strings.Index(afterBase, "[[service]]")],
		"other pool":                      replace("203.0.113.0/24", "203.0.113.0/30"),
		"with an error":                   replace("10.0.0.5", "10.0.0"),
		"not TOML":                        replace("10.0.0.5\"", "10.0.0"),
		"open list":                       replace("backends = [\"10.0.0.1\"]", "backends = [\"10.0.0.1\""),
		"header in a string":              replace(`"b"`, "'''b\n[[service]]\n'''"),
		"service elsewhere":               afterBase + "[admin]\n[service.other]\nx = 1\n",
		"other spelling":                  replace("[[service]]", "[[ service ]]"),
		"quoted":                          replace("[[service]]", `[["service"]]`),
		"a table of another section":      replace("[service.check]", "[log.check]"),
		"an indented section":             replace("[log]", "  [log]"),
		"a section, then the service":     replace("[service.check]\n", "[probe]\n[service.check]\n"),
		"an unknown key":                  replace("snat", "sant"),
		"a byte order mark":               "\xef\xbb\xbf" + afterBase,
		"carriage returns":                strings.ReplaceAll(afterBase, "\n", "\r\n"),
		"without a line break at the end": strings.TrimSuffix(afterBase, "\n"),
		"a list that looks like a header": replace("[\n \"10.0.0.4\",\n]", "[\n[\"10.0.0.4\"]\n]"),
	} {
		t.Run(name, func(t *testing.T) { sameAfter(t, before, text) })
	}
}

func FuzzParseAfter(f *testing.F) {
	for _, insert := range []string{
		"", "[[service]]\n", "[service.check]\n", "[x]\n", "\"\"\"", "[", "]", "\n", "service",
	} {
		for at := 0; at < len(afterBase); at += 37 {
			f.Add(afterBase, uint16(at), uint16(len(insert)), insert)
		}
	}
	f.Fuzz(func(t *testing.T, text string, at, drop uint16, insert string) {
		before, err := Parse("a.toml", []byte(text))
		if err != nil {
			return
		}
		start := min(int(at), len(text))
		end := min(start+int(drop), len(text))
		sameAfter(t, before, text[:start]+insert+text[end:])
	})
}
