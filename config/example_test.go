package config_test

import (
	"fmt"

	"github.com/steelyard-lb/steelyard/config"
)

// One service with three servers is announced to one router.
func ExampleParse() {
	c, err := config.Parse("steelyard.toml", []byte(`
[bgp]
asn   = 64512
peers = [{ address = "192.0.2.1", asn = 64500 }]

[[service]]
name     = "web"
address  = "203.0.113.10"
ports    = ["80:8080"]
backends = ["10.0.0.21", "10.0.0.22", "10.0.0.23"]
check    = { type = "http", path = "/healthz" }
`))
	if err != nil {
		fmt.Println(err)
		return
	}
	s := c.Services[0]
	fmt.Println(s.Name, s.Addresses, len(s.Backends), "backends,", s.Check.Type, "check every", s.Check.Interval)
	// Output: web [203.0.113.10] 3 backends, http check every 2s
}

// All errors are reported at once.
func ExampleErrors() {
	_, err := config.Parse("steelyard.toml", []byte(`
[[service]]
name     = "web"
address  = "203.0.113.10"
ports    = ["80:8080"]
backends = ["10.0.0.21"]
forward  = "dnat"
check    = { intervall = "2s", timeout = "5" }
`))
	fmt.Println(err)
	// Output:
	// steelyard.toml:7: service[0].forward (service "web"): unknown method "dnat"; allowed: nat, dsr, tunnel
	// steelyard.toml:8: service[0].check.timeout (service "web"): "5" is not a duration; write one like "500ms" or "2s"
	// steelyard.toml:8: service[0].check.intervall (service "web"): no such key; did you mean interval?
}
