package bgp

import (
	"os"
	"strings"
	"testing"
)

func TestParseMD5Dropped(t *testing.T) {
	for _, row := range []struct {
		text string
		want uint64
	}{
		{"TcpExt: SyncookiesSent TCPMD5NotFound TCPMD5Unexpected TCPMD5Failure\nTcpExt: 9 1 20 300\n" +
			"IpExt: InNoRoutes\nIpExt: 7\n", 321},
		{"TcpExt: SyncookiesSent\nTcpExt: 9\n", 0},
		{"TcpExt: SyncookiesSent TCPMD5NotFound\nTcpExt: 9\n", 0},
		{"", 0},
	} {
		if got := parseMD5Dropped(row.text); got != row.want {
			t.Errorf("%q: %d, want %d", row.text, got, row.want)
		}
	}
	if _, err := os.Stat("/proc/net/netstat"); err == nil {
		text, _ := os.ReadFile("/proc/net/netstat")
		if !strings.Contains(string(text), "TCPMD5Failure") {
			t.Error("this kernel has no counter TCPMD5Failure")
		}
	}
}
