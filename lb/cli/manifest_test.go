package cli

import (
	"strings"
	"testing"

	"github.com/steelyard-lb/steelyard/lb/lbtest/must"
)

// The flags become the configuration of the manifest, instead of the example.
func TestManifestConfiguration(t *testing.T) {
	const pool = "\n    [[pool]]\n    name = \"public\"\n    addresses = "
	const nodes = "    proxy = \"replace\"\n    # api_servers = [\"192.0.2.1:6443\"] # needed without kube-proxy\n"
	for _, tt := range []struct{ flags, policy, want string }{
		{"--l2 --pool 192.168.1.200-192.168.1.219", "['192.168.1.200/29', '192.168.1.208/29', '192.168.1.216/30']",
			"    [l2]\n" + pool + "[\"192.168.1.200-192.168.1.219\"]\n---\n"},
		{"--bgp asn=64512,peer=192.0.2.1:64500,peer=[2001:db8::1]:4200000000 " +
			"--pool 203.0.113.0/28 --pool 2001:db8:1::/112",
			"['203.0.113.0/28', '2001:db8:1::/112']",
			"    [bgp]\n    asn = 64512\n    peers = [{ address = \"192.0.2.1\", asn = 64500 }, " +
				"{ address = \"2001:db8::1\", asn = 4200000000 }]\n" +
				pool + "[\"203.0.113.0/28\", \"2001:db8:1::/112\"]\n---\n"},
		{"--pool node", "[]", nodes + "\n    [[pool]]\n    name = \"nodes\"\n    addresses = [\"node\"]\n---\n"},
		{"--l2 --pool node --pool 192.0.2.0/28", "[]", nodes + "\n    [l2]\n" + pool + "[\"192.0.2.0/28\"]\n" +
			"    [[pool]]\n    name = \"nodes\"\n    addresses = [\"node\"]\n---\n"},
	} {
		code, out, errOut := steelyard(t, strings.Fields("manifest --image x:1 "+tt.flags)...)
		must.True(t, code == 0 && errOut == "" && strings.Contains(out, "nodes may not\n\n"+tt.want) &&
			strings.Contains(out, "\n      expression: \""+tt.policy+"\"\n"),
			"%s: code %d, %s\n%s", tt.flags, code, errOut, out)
		_, plain, _ := steelyard(t, "manifest", "--image", "x:1")
		must.True(t, strings.Count(out, "\n---\n") == strings.Count(plain, "\n---\n") &&
			!strings.Contains(out, "# [[pool]]"), "%s: other objects, or the example\n%s", tt.flags, out)
	}
	for _, tt := range []struct{ flags, want string }{
		{"--l2", "announcing addresses needs --l2 or --bgp, and --pool"},
		{"--pool 192.0.2.0/28", "announcing addresses needs --l2 or --bgp, and --pool"},
		{"--l2 --pool node", "announcing addresses needs --l2 or --bgp, and --pool with a range"},
		{"--l2 --pool 192.0.2.300", "192.0.2.300"},
		{"--bgp peer=192.0.2.1:64500 --pool 192.0.2.0/28", "asn=NUMBER and at least one"},
		{"--bgp asn=1,peer=192.0.2.1 --pool 192.0.2.0/28", `"192.0.2.1" is not ADDRESS:ASN`},
		{"--bgp asn=1,peer=192.0.2.1:x --pool 192.0.2.0/28", `"192.0.2.1:x" has no AS number`},
		{"--bgp asn=1,as=2 --pool 192.0.2.0/28", `"as=2" is neither`},
		{"--cleanup --l2 --pool 192.0.2.0/28", "--cleanup takes no configuration"},
	} {
		code, out, errOut := steelyard(t, strings.Fields("manifest "+tt.flags)...)
		must.True(t, code == 2 && out == "" && strings.Contains(errOut, tt.want),
			"%s: code %d, stdout %q, stderr %q; want %q", tt.flags, code, out, errOut, tt.want)
	}
}
