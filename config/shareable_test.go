package config

import (
	"strings"
	"testing"

	"github.com/steelyard-lb/steelyard/lb/lbtest/must"
)

func TestShareable(t *testing.T) {
	out := must.Get(Shareable(`
# the password is s3cret
[[service]]
name = "web" # s3cret
address = "203.0.113.10"
ports = ["80"]
check = { type = "http", path = "/health?token=s3cret", Send = "", port = 8080 }
backends = ["10.0.0.21", { address = "10.0.0.22", weight = 2 }]

[[service]]
check = { type = "udp", send = "AUTH s3cret", expect_body = "welcome, s3cret" }

[[bgp.peers]]
password_file = "/etc/steelyard/peer.key"

[[bgp.peers]]
password = "s3cret" # invalid, but an agent that does not start may have been given it
[l2]
Secret = ["s3cret"]

[probe]
proxy_healthz = "http://user:s3cret@127.0.0.1:10256/healthz?token=s3cret"
[kubernetes]
api_servers = ["https://user:s3c?ret/s3cret@192.0.2.1:6443/x#s3cret"]
`))(t)
	must.True(t, !strings.Contains(out, "s3cret"), "%s", out)
	for _, want := range []string{
		`name = "web"`, `path = "/health?[redacted]"`, `password_file = "/etc/steelyard/peer.key"`, "10.0.0.22",
		`Send = ""`, `send = "[redacted]"`, `expect_body = "[redacted]"`, "port = 8080", `password = "[redacted]"`,
		`"http://[redacted]@127.0.0.1:10256/healthz?[redacted]"`, `"https://[redacted]@192.0.2.1:6443/x?[redacted]"`,
	} {
		must.True(t, strings.Contains(out, want), "%s is not in:\n%s", want, out)
	}
	_, err := Shareable("[bgp]\npassword = s3cret\n")
	must.True(t, err != nil && !strings.Contains(err.Error(), "s3cret"), "%v", err)
}
