package config

import (
	"fmt"
	"testing"
)

// The keys of a check are validated for its type.
func TestCheckKeys(t *testing.T) {
	for keys, want := range map[string]bool{
		`type = "http", path = "/a"`: true, `type = "http", path = "a"`: false, `type = "http", path = "/a b"`: false,
		`type = "exec", path = "/a"`: true, `type = "exec", path = "a"`: false, `type = "exec"`: false,
		`type = "tcp", path = ""`: true, `type = "tcp", path = "/a"`: false, `type = "none", path = "/a"`: true,
		`type = "dns"`: false, `type = "dns", host = "a.example"`: true, `type = "http", host = "a_b:80"`: true,
		`type = "http", host = "192.0.2.1"`: true, `type = "http", host = "2001:db8::1"`: true,
		`type = "http", host = "[::1]:80"`: true, `type = "http", host = "a b"`: false,
		`type = "http", host = "-a"`: false, `type = "none", host = "a b"`: true,
		`type = "https", tls_server_name = "a"`: true, `type = "https", tls_server_name = "192.0.2.1"`: true,
		`type = "https", tls_server_name = "a b"`: false, `type = "http", tls_server_name = "a"`: false,
		`port = 0`: true, `port = 65535`: true, `port = -1`: false, `port = 65536`: false,
		`rise = 1`: true, `rise = 100`: true, `rise = 0`: false, `rise = 101`: false,
		`fall = 1`: true, `fall = 100`: true, `fall = 0`: false, `fall = 101`: false,
		`expect_status = "200-399"`: true, `expect_status = "200"`: false,
		`type = "http", expect_status = "200"`: true, `type = "none", expect_status = "200"`: true,
	} {
		text := fmt.Sprintf(withService, "check = { "+keys+" }")
		if _, err := Parse("steelyard.toml", []byte(text)); (err == nil) != want {
			t.Errorf("%s: %v, want accepted: %t", keys, err, want)
		}
	}
}
