package lb

import (
	"fmt"
	"testing"
)

func TestParseQuestion(t *testing.T) {
	for _, tt := range []struct{ client, to, want string }{
		{"198.51.100.7", "203.0.113.10:80", "198.51.100.7:40000 203.0.113.10:80 tcp"},
		{"198.51.100.7:1234", "203.0.113.10:53/udp", "198.51.100.7:1234 203.0.113.10:53 udp"},
		{"2001:db8::7", "[2001:db8:1::10]:80/sctp", "[2001:db8::7]:40000 [2001:db8:1::10]:80 sctp"},
		{"me", "203.0.113.10:80", ""}, {"198.51.100.7", "203.0.113.10", ""},
		{"198.51.100.7", "203.0.113.10:80/icmp", ""}, {"2001:db8::7", "203.0.113.10:80", ""},
		{"198.51.100.7", "203.0.113.10:80/", ""}, {"", "", ""},
	} {
		q, err := ParseQuestion(tt.client, tt.to)
		got := fmt.Sprint(q.Client, " ", q.To, " ", q.Protocol)
		if err != nil {
			got = ""
		}
		if got != tt.want {
			t.Errorf("%q, %q: %q (%v); want %q", tt.client, tt.to, got, err, tt.want)
		}
	}
}
