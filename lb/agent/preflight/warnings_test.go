package preflight

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/steelyard-lb/steelyard/config"
	"github.com/steelyard-lb/steelyard/lb/lbtest/must"
)

// A setting that is valid but does not work on this machine is a warning with its line.
func TestWarnings(t *testing.T) {
	const service = "[[service]]\nname = \"web\"\naddress = \"192.0.2.10\"\nports = [\"80\"]\n"
	file := filepath.Join(t.TempDir(), "secret")
	must.Do(t, os.WriteFile(file, []byte("0123456789abcdef"), 0o600))
	secret := fmt.Sprintf("[l2]\nsecret_file = %q\n", file)
	exec := func(path string) string {
		const check = "backends = [\"10.0.0.1\"]\n[service.check]\ntype = \"exec\"\n"
		return "[l2]\n" + service + check + "path = \"" + path + "\"\n"
	}
	for _, tt := range []struct{ name, text, want string }{
		{"other hosts", "[l2]\n" + service + "backends = [\"10.0.0.1\"]\n", ""},
		{"a source that no interface has",
			"[bgp]\nasn = 64512\npeers = [{ address = \"192.0.2.1\", asn = 64500, source = \"192.0.2.11\" }, " +
				"{ address = \"192.0.2.2\", asn = 64500, source = \"192.0.2.99\" }]\n" +
				strings.Replace(service, "192.0.2.10", "203.0.113.10", 1) + "backends = [\"10.0.0.1\"]\n",
			"f:3: bgp.peers[1].source: no interface has 192.0.2.99, so there is no session until one does; write an"},
		{"a backend that is this machine", "[l2]\n" + service + "backends = [\"10.0.0.1\", \"192.0.2.11:8080\"]\n", ""},
		{"a backend that is this machine, with dsr",
			"[l2]\n" + service + "forward = \"dsr\"\nbackends = [\"10.0.0.1\",\n\"192.0.2.11\"]\n",
			"f:8: service[0].backends[1] (service \"web\"): 192.0.2.11 is the address of eth0, but forward = \"dsr\" " +
				"only reaches other hosts; write the address of another host"},
		{"the same as a table",
			"[l2]\n" + service + "forward = \"dsr\"\n[[service.backends]]\naddress = \"192.0.2.11\"\n",
			"f:7: service[0].backends[0] (service \"web\"): 192.0.2.11 is the address of eth0, but forward"},
		{"members that are this machine",
			secret + "members = [\"192.0.2.11\"]\n" + service + "backends = [\"10.0.0.1\"]\n",
			"f:3: l2.members: has no other member: 192.0.2.11 is the address of eth0; add the addresses of the other"},
		{"members besides this machine",
			secret + "members = [\"192.0.2.11\", \"192.0.2.12\"]\n" + service + "backends = [\"10.0.0.1\"]\n",
			""},
		{"a program", exec("/bin/sh"), ""},
		{"a user that is not there", exec("/bin/sh\"\nuser = \"no-such"),
			"f:10: service[0].check.user (service \"web\"): there is no user \"no-such\"; name a user of this machine"},
		{"a program that is not there", exec("/no/such"),
			"f:9: service[0].check.path (service \"web\"): there is no file /no/such; name a program of this machine"},
		{"a file that is none", exec("/etc/passwd"),
			"f:9: service[0].check.path (service \"web\"): user nobody cannot execute it: the mode of /etc/passwd"},
		{"a directory", exec("/"), "f:9: service[0].check.path (service \"web\"): / is not a file; the program"},
		{"an address on the link",
			"[bgp]\nasn = 64512\npeers = [{ address = \"192.0.2.1\", asn = 64500 }]\n" +
				service + "backends = [\"10.0.0.1\"]\n",
			"f:6: service[0].address (service \"web\"): hosts on eth0 resolve 192.0.2.10 by ARP or NDP"},
		{"an address on no link, by ARP",
			"[l2]\n" + strings.Replace(service, "192.0.2.10", "203.0.113.10", 1) + "backends = [\"10.0.0.1\"]\n",
			"f:4: service[0].address (service \"web\"): 203.0.113.10 is in no prefix of this machine's links, so no"},
		{"a pool on no link, by ARP alone",
			secret + "[bgp]\nasn = 64512\npeers = [{ address = \"192.0.2.1\", asn = 64500 }]\n" +
				"[[pool]]\nname = \"a\"\naddresses = [\"203.0.113.0/28\"]\n" +
				"[[pool]]\nname = \"b\"\naddresses = [\"198.51.100.0/28\"]\nannounce = [\"l2\"]\n" +
				strings.Replace(service, "192.0.2.10", "203.0.113.10", 1) + "backends = [\"10.0.0.1\"]\n",
			"f:11: pool[1].addresses[0] (pool \"b\"): 198.51.100.0 is in no prefix of this machine's links, so no"},
	} {
		cfg, err := config.Parse("f", []byte(tt.text), Warnings(lan{}), Programs((*config.Report).Warnf))
		if err != nil {
			t.Errorf("%s: %v", tt.name, err)
			continue
		}
		if got := strings.Join(cfg.Warnings, "\n"); !strings.HasPrefix(got, tt.want) || (got == "") != (tt.want == "") {
			t.Errorf("%s: warnings %q; want %q", tt.name, got, tt.want)
		}
	}
}
