package config

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/BurntSushi/toml"

	"github.com/steelyard-lb/steelyard/lb/lbtest/must"
)

// If a reader of an address or a community fails, it reports exactly one error.
func TestWrongAddressIsNotRead(t *testing.T) {
	v4 := []any{"192.0.2.1", "2001:db8::1"}
	for _, c := range []struct {
		name         string
		read         func(item) bool
		wrong, right []any
	}{
		{"address", func(i item) bool { _, ok := i.addr(); return ok },
			[]any{int64(7), "x", "::ffff:192.0.2.1", "fe80::1%eth0", "192.0.2.1/32"}, append(v4, "fe80::1", "0.0.0.0")},
		{"unicast", func(i item) bool { _, ok := i.unicast(); return ok },
			[]any{int64(7), "x", "127.0.0.1", "fe80::1", "224.0.0.1"}, v4},
		{"host", func(i item) bool { _, ok := i.host(); return ok },
			[]any{int64(7), "x", "0.0.0.0", "::", "224.0.0.1", "ff02::1"}, append(v4, "127.0.0.1", "fe80::1")},
		{"prefix", func(i item) bool { _, ok := i.prefix(); return ok },
			[]any{int64(7), "x", "192.0.2.1/24", "192.0.2.0/33", "::ffff:192.0.2.0/120"},
			append(v4, "192.0.2.0/24", "0.0.0.0/0", "::/0")},
		{"range", func(i item) bool { _, ok := i.addrRange(); return ok },
			[]any{int64(7), "x", "192.0.2.1-x", "x-192.0.2.1", "192.0.2.1-2001:db8::1", "192.0.2.2-192.0.2.1",
				"192.0.2.1/24", "126.0.0.0-127.0.0.0"},
			append(v4, "192.0.2.1-192.0.2.1", "192.0.2.1 - 192.0.2.9", "192.0.2.0/24")},
		{"community", func(i item) bool { _, ok := i.community(); return ok },
			[]any{int64(7), "x", "1:65536"}, []any{"1:65535", "no-export"}},
		{"ports", func(i item) bool { _, ok := i.portRanges(); return ok },
			[]any{int64(7), "2000", "1023-2000", "2000-x", "2000-1999"}, []any{"1024-1024", "2000-65535"}},
		{"statuses", func(i item) bool { _, ok := i.statuses(); return ok },
			[]any{int64(200), "", "99", "600", "99-200", "200-600", "300-200", "200-x", "x-200", "200,"},
			[]any{"100", "599", "100-599", "200, 204,300-300"}},
		{"peer", func(i item) bool { return i.peerAddress(map[netip.Addr]string{}).IsValid() },
			[]any{int64(7), "x", "fe80::1", "2001:db8::1%eth0", "0.0.0.0"}, append(v4, "169.254.1.1", "fe80::1%eth0")},
		{"backend", func(i item) bool { _, ok := i.backend(); return ok },
			[]any{int64(7), "10.0.0.1:0", "127.0.0.1", map[string]any{}, map[string]any{"address": "x"}},
			[]any{"10.0.0.1", "10.0.0.1:1", "[2001:db8::1]:80", map[string]any{"address": "10.0.0.1"}}},
		{"listen", func(i item) bool { return i.d.listen(i) != "" },
			[]any{int64(7), "127.0.0.1", "127.0.0.1:x", "x:80"}, []any{":80", "127.0.0.1:0", "[::1]:80"}},
	} {
		for n, value := range append(c.wrong, c.right...) {
			d, want := newDecoder("steelyard.toml"), n >= len(c.wrong)
			if got := c.read(item{d: d, value: value}); got != want || (len(d.errs) == 0) != want || len(d.errs) > 1 {
				t.Errorf("%s of %v: %t, errors %v; want %t", c.name, value, got, d.errs, want)
			}
		}
	}
}

// For an address followed by something else, the hint is the address.
func TestHintOfAddress(t *testing.T) {
	const form = `write one like "192.0.2.1" or "2001:db8::1"`
	for s, want := range map[string]string{
		"192.0.2.1/32": `write "192.0.2.1"`, "192.0.2.1/24": `write "192.0.2.1"`, "192.0.2.0/24": form, "x": form,
		"192.0.2.1:80": `write "192.0.2.1", without a port`,
	} {
		d := newDecoder("")
		(item{d: d, value: s}).addr()
		must.True(t, d.errs[0].Hint == want, "%s: hint %s, want %s", s, d.errs[0].Hint, want)
	}
}

// A syntax error is reported at the last position of its key that is not below the error.
func TestSyntaxErrorPosition(t *testing.T) {
	const text = "[[a]]\nb = [1]\n\n[[a]]\nb = 2\n"
	for _, c := range []struct {
		start, line int
		last, want  string
	}{
		{-1, 1, "a.b", ""}, {0, 1, "a", "a[0]"},
		{6, 2, "a.b", "a[0].b"}, {14, 3, "a.b", "a[0].b"}, {15, 4, "a", "a[1]"},
		{21, 5, "a.b", "a[1].b"}, {21, 5, "", ""}, {21, 5, "c", ""}, {99, 6, "a.b", "a[1].b"},
	} {
		err := toml.ParseError{Message: "m.", Position: toml.Position{Start: c.start}, LastKey: c.last}
		d := newDecoder("")
		d.text = text
		got := d.syntaxError(err)
		must.True(t, got.Line == c.line && got.Key == c.want && got.Problem == "not TOML: m",
			"%d %q: %d %q, %s; want %d %q", c.start, c.last, got.Line, got.Key, got.Problem, c.line, c.want)
	}
}

func TestSuggestLimits(t *testing.T) {
	for _, c := range []struct{ written, words, want string }{
		{"add", "address", "address"}, {"ad", "address", ""}, {"xyz", "abcz", ""}, {"abcdef", "bdf", ""},
		{"qqqqa", "qqqqb qqqqc", "qqqqb"}, {strings.Repeat("a", 99), "port", ""},
	} {
		must.Row(t, fmt.Sprintf("%s of %s", c.written, c.words), c.want, suggest(c.written, strings.Fields(c.words)))
	}
}

// One mistake causes one error: values that depend on the wrong one are not reported.
func TestOneErrorForOneMistake(t *testing.T) {
	const (
		service = "[[service]]\nname = \"s\"\nports = [\"80\"]\n"
		v4, v6  = "\nbackends = [\"10.0.0.1\"]\n", "\nbackends = [\"2001:db8::1\"]\n"
		pool    = "[[pool]]\nname = \"p\"\naddresses = "
	)
	for text, key := range map[string]string{
		"[probe]\ninterval = 7\ntimeout = \"2s\"":                                 "probe.interval",
		"[probe]\ninterval = \"1s\"\ntimeout = \"2s\"":                            "probe.timeout",
		service + "address = \"203.0.113.1\"\nbackends = [\"10.0.0.1:0\"]":        "service[0].backends[0]",
		service + "address = \"203.0.113.x\"" + v6:                                "service[0].address",
		service + "pool = \"p\"" + v6:                                             "service[0].pool",
		service + "pool = \"p\"" + v6 + pool + "[\"x\"]":                          "pool[0].addresses[0]",
		service + "pool = \"q\"" + v4 + pool + "[\"x\"]":                          "pool[0].addresses[0]",
		service + "address = \"203.0.113.1\"" + v4 + pool + "[]":                  "pool[0].addresses",
		service + "pool = \"p\"" + v4 + "[[pool]]\naddresses = [\"203.0.113.1\"]": "pool[0].name",
	} {
		_, err := Parse("steelyard.toml", []byte(text))
		errs, _ := err.(Errors)
		must.True(t, len(errs) == 1 && errs[0].Key == key, "%s:\n%v; want one error at %s", text, err, key)
	}
}

// min_healthy counts each family's backends separately; a tunnel also reaches backends of the other family.
func TestMinHealthyByFamily(t *testing.T) {
	const v4, v6 = `"203.0.113.1"`, `"2001:db8:1::1"`
	for _, c := range []struct {
		address, backends, forward string
		most                       int
	}{
		{v4, `"10.0.0.1", "10.0.0.2"`, "nat", 2},
		{v6, `"2001:db8::1", "2001:db8::2"`, "nat", 2},
		{v4 + "," + v6, `"10.0.0.1", "10.0.0.2", "2001:db8::1"`, "nat", 1},
		{v4, `"2001:db8::1", "2001:db8::2"`, "tunnel", 2},
		{v6, `"10.0.0.1"`, "tunnel", 1},
	} {
		for n := c.most; n <= c.most+1; n++ {
			_, err := Parse("steelyard.toml", fmt.Appendf(nil, "[[service]]\nname = \"s\"\nports = [\"80\"]\n"+
				"address = [%s]\nbackends = [%s]\nforward = %q\nmin_healthy = %d", c.address, c.backends, c.forward, n))
			must.True(t, (err == nil) == (n == c.most),
				"%d of %s for %s by %s: %v", n, c.backends, c.address, c.forward, err)
		}
	}
}

// These settings cause warnings, unlike the ones next to them.
func TestWhatIsWarnedOf(t *testing.T) {
	const announced, nothing = "no address is announced", "nothing to do"
	service := fmt.Sprintf(withService, "")
	udpOnly := func(check string) string {
		return strings.Replace(fmt.Sprintf(withService, check), `["80"]`, `["80/udp"]`, 1)
	}
	for _, c := range []struct{ text, want string }{
		{"[datapath]\ntunnel_sources = [\"192.0.2.1\"]", "can forge packets"},
		{"[l2]" + service + "[admin]\nlisten = \":9911\"", "admin.listen: every host that reaches :9911 can read"},
		{"[l2]" + service + "[admin]\nlisten = \"[::]:9911\"\nallow = [\"192.0.2.0/24\"]", ""},
		{"[l2]" + service + "[admin]\nlisten = \"127.0.0.1:9911\"", ""},
		{"[kubernetes]\n[l2]\n[datapath]\ntunnel_sources = [\"192.0.2.1\"]", ""},
		{"[l2]", nothing}, {"service = []", ""}, {"[kubernetes]\n[l2]", ""},
		{"[kubernetes]", "1: kubernetes: " + announced}, {service, "2: service: " + announced},
		{"[bgp]\nasn = 1\n[kubernetes]", "1: bgp: has no peers"},
		{"[l2]" + service, ""}, {"[l2]" + fmt.Sprintf(withService, "allow = [\"192.0.2.0/24\", \"::/0\"]"), ""},
		{"[l2]" + fmt.Sprintf(withService, "forward = \"tunnel\"\ntunnel = \"gue\""), ""},
		{"[l2]" + service + "[[service]]\nname = \"t\"\naddress = \"203.0.113.11\"\nports = [\"80\"]\n" +
			"backends = [\"10.0.0.3\",\n\"203.0.113.10\"]",
			"12: service[1].backends[1] (service \"t\"): 203.0.113.10 is an address of service \"s\""},
		{"[l2]" + fmt.Sprintf(withService, "check = \"udp\""), "check.type (service \"s\"): probes with udp, but the"},
		{"[l2]" + fmt.Sprintf(withService, "check = { type = \"dns\", host = \"a.example\" }"), "probes with udp"},
		{"[l2]" + fmt.Sprintf(withService, "check = { type = \"udp\", port = 53 }"), ""},
		{"[l2]" + strings.Replace(fmt.Sprintf(withService, "check = \"udp\""), `["80"]`, `["80", "53/udp"]`, 1), ""},
		{"[l2]" + fmt.Sprintf(withService, "check = { port = 32080 }"), "check.port (service \"s\"): a check of ty"},
		{"[l2]" + strings.Replace(service, `["80"]`, `["80:32080"]`+"\ncheck = { port = 32080 }", 1), ""},
		{"[l2]" + fmt.Sprintf(withService, "check = { type = \"http\", port = 32080 }"), ""},
		{"[l2]" + udpOnly("check = \"http\""), "check.type (service \"s\"): probes with tcp, but the service has no"},
		{"[l2]" + udpOnly("check = \"tcp\""), "probes with tcp"},
		{"[l2]" + udpOnly("check = { type = \"http\", port = 80 }"), ""},
		{"[l2]" + udpOnly("check = \"udp\""), ""}, {"[l2]" + udpOnly("check = \"none\""), ""},
		{"[l2]\n" + strings.Replace(service, `"10.0.0.1"`, `{ address = "10.0.0.1", drain = true }`, 1), ""},
		{"[l2]\n" + strings.Replace(service, `"10.0.0.1"`, `{ address = "10.0.0.1", weight = 0 }`, 1), ""},
		{"[kubernetes]\n[l2]\n[datapath.timeouts]\nestablished = \"124m\"", ""},
		{"[kubernetes]\n[l2]\n[datapath.timeouts]\nestablished = \"123m59s\"", "idle for longer are ended"},
		{"[kubernetes]\n[l2]\n[[pool]]\nname = \"p\"\naddresses = [\"203.0.113.1\"]\nnamespaces = [\"a\"]", ""},
		{"[kubernetes]\nproxy = \"replace\"\n[[pool]]\nname = \"p\"\naddresses = [\"node\"]", ""},
		{"[kubernetes]\nproxy = \"replace\"\n[l2]\n[[pool]]\nname = \"p\"\naddresses = [\"node\"]\nannounce = [\"l2\"]",
			"pool[0].announce (pool \"p\"): has no effect on the nodes' addresses"},
	} {
		got := mustParseText(t, c.text).Warnings
		found := slices.ContainsFunc(got, func(w string) bool { return strings.Contains(w, c.want) })
		if c.want == "" && len(got) > 0 || c.want != "" && (len(got) != 1 || !found) {
			t.Errorf("%s:\nwarnings %q, want %q", c.text, got, c.want)
		}
	}
}

// A min_healthy that is unreachable because backends accept no new connections causes a warning.
func TestUnreachableMinHealthy(t *testing.T) {
	const v4, idle4, drained4, v6 = `"10.0.0.1"`, `{ address = "10.0.0.2", weight = 0 }`,
		`{ address = "10.0.0.3", drain = true }`, `"2001:db8::1", "2001:db8::2"`
	const both = `"203.0.113.10", "2001:db8:1::10"`
	const oneOfTwo = "2 is more than the IPv4 backends that accept new connections: 1 of 2"
	for _, c := range []struct {
		address, backends string
		minHealthy        int
		want              string
	}{
		{`"203.0.113.10"`, v4 + "," + idle4, 2, oneOfTwo},
		{`"203.0.113.10"`, v4 + "," + drained4, 2, oneOfTwo},
		{both, v4 + "," + idle4 + "," + v6, 2, oneOfTwo},
		{both, v4 + "," + idle4 + "," + v6, 1, ""},
		{`"203.0.113.10"`, idle4 + "," + drained4, 2, "none accepts new connections"},
	} {
		text := fmt.Sprintf("[[service]]\nname = \"s\"\nports = [\"80\"]\naddress = [%s]\nbackends = [%s]\n"+
			"min_healthy = %d\n", c.address, c.backends, c.minHealthy)
		all := strings.Join(mustParseText(t, text).Warnings, "\n")
		got := strings.Contains(all, "accept new") || strings.Contains(all, "accepts new")
		must.True(t, got == (c.want != "") && strings.Contains(all, c.want),
			"%s of %s: %s; want %q", c.backends, c.address, all, c.want)
	}
}

// Suggestions include keys that are read only if present (a wrong suggestion would change the AS).
func TestSuggestionsKnowOptionalKeys(t *testing.T) {
	const peer = "[bgp]\nasn = 64512\n[[bgp.peers]]\naddress = \"192.0.2.1\"\nasn = 64500\n"
	const pool = "[bgp]\nasn = 64512\n[[pool]]\nname = \"p\"\naddresses = [\"203.0.113.0/28\"]\n"
	for _, tt := range []struct{ text, want string }{
		{peer + "localpref = 1", "localpref: no such key; did you mean local_pref?"},
		{peer + "metric = 1", "local_pref, med, "},
		{pool + "mad = 1", "did you mean med?"},
	} {
		_, err := Parse("f", []byte(tt.text))
		must.True(t, err != nil && strings.Contains(err.Error(), tt.want), "%v; want %s", err, tt.want)
	}
}

func TestRestartTime(t *testing.T) {
	for _, tt := range []struct {
		line string
		want time.Duration
		err  string
	}{
		{"", 30 * time.Second, ""},
		{`restart_time = "0s"`, 0, ""},
		{`restart_time = "4095s"`, 4095 * time.Second, ""},
		{`restart_time = "1500ms"`, 0, `"1500ms" is not a whole number of seconds; write "2s"`},
		{`restart_time = "4096s"`, 0, "restart_time"},
	} {
		c, err := Parse("f", []byte("[bgp]\nasn = 64512\n"+tt.line))
		switch {
		case tt.err != "" && (err == nil || !strings.Contains(err.Error(), tt.err)):
			t.Errorf("%s: error %v; want %s", tt.line, err, tt.err)
		case tt.err == "" && (err != nil || c.BGP.RestartTime != tt.want):
			t.Errorf("%s: %v; want %s", tt.line, err, tt.want)
		}
	}
}
