package config

import (
	"fmt"
	"slices"
	"strings"
	"testing"
)

// address_per_node warns where [l2] does not have several members, or the service not several addresses.
func TestAddressPerNode(t *testing.T) {
	const (
		head  = "[[pool]]\nname = \"p\"\naddresses = [\"203.0.113.0/24\"]\n"
		tail  = "[[service]]\nname = \"s\"\nports = [\"80\"]\nbackends = [\"10.0.0.1\"]\naddress_per_node = true\n"
		on    = "[l2]\nmembers = [\"192.0.2.12\"]\nunencrypted = true\n"
		alone = "[l2]\n"
		pool  = "pool = \"p\"\n"
		two   = "address = [\"203.0.113.1\", \"203.0.113.2\"]\n"
		one   = "address = \"203.0.113.1\"\n"
	)
	for _, x := range []struct{ text, warning string }{
		{on + head + tail + pool, ""},
		{on + head + tail + two, ""},
		{alone + "[kubernetes]\n" + head + tail + two, ""},
		{"[bgp]\nasn = 1\n" + head + tail + pool, "[l2] does not announce"},
		{on + "[bgp]\nasn = 1\n" + head + "announce = [\"bgp\"]\n" + tail + pool, "[l2] does not announce"},
		{alone + head + tail + two, "without other members"},
		{alone + "[kubernetes]\n" + head + tail + pool, "without other members"},
		{on + head + tail + one, "with one address"},
	} {
		c := mustParseText(t, x.text)
		got := strings.Join(slices.DeleteFunc(slices.Clone(c.Warnings), func(w string) bool {
			return !strings.Contains(w, "address_per_node")
		}), "")
		if !c.Services[0].AddressPerNode || (got == "") != (x.warning == "") || !strings.Contains(got, x.warning) {
			t.Errorf("%q: warnings %q; want %q", x.text, got, x.warning)
		}
	}
}

// An address that routers have is a warning where [l2] announces it.
func TestSubnetRouterAnycast(t *testing.T) {
	const service = "[[service]]\nname = \"s\"\nports = [\"80\"]\nbackends = [\"fd00::1\"]\naddress = \"%s\"\n"
	const both = "[bgp]\nasn = 1\n[l2]\n[[pool]]\nname = \"p\"\naddresses = [\"2001:db8::/48\"]\nannounce = [\"%s\"]\n"
	for _, x := range []struct {
		head, address string
		want          bool
	}{
		{"[l2]\n", "2001:db8::", true}, {"[l2]\n", "2001:db8:0:7::", true}, {"[l2]\n", "2001:db8::1", false},
		{"[l2]\n", "2001:db8::1:0:0:0", false}, {"[bgp]\nasn = 1\n", "2001:db8::", false},
		{fmt.Sprintf(both, "bgp"), "2001:db8::", false}, {fmt.Sprintf(both, "l2"), "2001:db8::", true},
	} {
		c := mustParseText(t, x.head+fmt.Sprintf(service, x.address))
		if got := strings.Contains(strings.Join(c.Warnings, ""), "subnet-router anycast"); got != x.want {
			t.Errorf("%s%s: warnings %q", x.head, x.address, c.Warnings)
		}
	}
}
