package config

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/steelyard-lb/steelyard/lb/lbtest/must"
)

func TestTunnelKeyFile(t *testing.T) {
	const a, b, c, d = "aaaaaaaaaaaaaaaa", "bbbbbbbbbbbbbbbb", "cccccccccccccccc", "dddddddddddddddd"
	for _, tt := range []struct{ text, keys, seed, err string }{
		{a, a, "", ""},
		{a + "\n", a, "", ""},
		{"  " + a + " \r\n\r\n# the next one\n" + b, a + " " + b, "", ""},
		{a + "\n" + b + "\n" + c + "\n", a + " " + b + " " + c, "", ""},
		{a + "\nseed: " + d + "\n" + b, a + " " + b, d, ""},
		{"seed:" + d + "\n" + a, a, d, ""},
		{a + "\n" + b + "\n" + c + "\n" + d, "", "", "k, line 4: is one key too many; at most 3"},
		{a + "\nshort", "", "", "k, line 2: has only 5 bytes; write at least 16"},
		{a + "\nseed: short", "", "", "k, line 2: has only 5 bytes"},
		{a + "\nseed: " + d + "\nseed: " + c, "", "", "k, line 3: is a second seed"},
		{"seed: " + d + "\n", "", "", "k has no key"},
		{a + "\nSeed: " + d, "", "", `k, line 2: begins with a word and a colon that is not "seed:"; write "seed:"`},
		{a + "\nsed:\t" + d, "", "", "k, line 2: begins with a word"},
		{"correct-horse:battery: staple\n" + a, "correct-horse:battery: staple " + a, "", ""}, // a passphrase
		{"# " + a + "\n\n", "", "", "k has no key"},
		{"", "", "", "k has no key"},
		{a + "\xff", "", "", "k is not text"},
		{a + "\x00", "", "", "k is not text"},
	} {
		dir := t.TempDir()
		must.Do(t, os.WriteFile(filepath.Join(dir, "k"), []byte(tt.text), 0o600))
		cfg, err := Parse(filepath.Join(dir, "steelyard.toml"), []byte("[datapath]\ntunnel_key_file = \"k\"\n"))
		if tt.err != "" {
			must.True(t, err != nil && strings.Contains(err.Error(), tt.err) && !strings.Contains(err.Error(), a),
				"%q: error %v; want %q and no key", tt.text, err, tt.err)
			continue
		}
		if err != nil {
			t.Errorf("%q: %v", tt.text, err)
			continue
		}
		var keys []string
		for _, k := range cfg.Datapath.TunnelKeys {
			keys = append(keys, k.Reveal())
		}
		if got := strings.Join(keys, " "); got != tt.keys || cfg.Datapath.HashSeed.Reveal() != tt.seed {
			t.Errorf("%q: keys %q, seed %q; want %q and %q", tt.text, got, cfg.Datapath.HashSeed.Reveal(), tt.keys,
				tt.seed)
		}
	}
}

// A key that is sent to no server of a service by GUE is warned of.
func TestKeysWithoutTunnelSources(t *testing.T) {
	file := filepath.Join(t.TempDir(), "k")
	must.Do(t, os.WriteFile(file, []byte("aaaaaaaaaaaaaaaa\n"), 0o600))
	const warning = `service[0].tunnel (service "s"): the key of datapath.tunnel_key_file is sent to none of its ` +
		`backends; add those that run Steelyard to datapath.tunnel_sources here as well`
	const gue = "forward = \"tunnel\"\ntunnel = \"gue\""
	keys := fmt.Sprintf("tunnel_key_file = %q\n", file)
	for _, tt := range []struct{ datapath, service, want string }{
		{keys, gue, warning},
		{keys + `tunnel_sources = ["192.0.2.11"]`, gue, warning},
		{keys + `tunnel_sources = ["10.0.0.2"]`, gue, ""},
		{keys, `forward = "tunnel"`, "has no effect without tunnels"},
		{"", gue, ""},
	} {
		got := mustParseText(t, "[datapath]\n"+tt.datapath+"\n"+fmt.Sprintf(withPeer, "")+
			fmt.Sprintf(withService, tt.service)).Warnings
		if len(got) > 1 || (len(got) == 0) != (tt.want == "") || !strings.Contains(strings.Join(got, ""), tt.want) {
			t.Errorf("%s, %s: warnings %q; want %q", tt.datapath, tt.service, got, tt.want)
		}
	}
}
