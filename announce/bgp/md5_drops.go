package bgp

import (
	"os"
	"slices"
	"strconv"
	"strings"
)

// md5Dropped returns how many TCP segments this network namespace has dropped for a missing, unexpected or wrong MD5
// signature; 0 when the kernel has no such counters. (TcpExt in /proc/net/netstat; kernel snmp_counter.rst.)
func md5Dropped() uint64 {
	text, err := os.ReadFile("/proc/net/netstat")
	if err != nil {
		return 0
	}
	return parseMD5Dropped(string(text))
}

// parseMD5Dropped reads pairs of lines: "TcpExt: Name Name …" and "TcpExt: 1 2 …".
func parseMD5Dropped(text string) uint64 {
	var names, values []string
	for line := range strings.Lines(text) {
		fields := strings.Fields(line)
		if len(fields) == 0 || fields[0] != "TcpExt:" {
			continue
		}
		if names == nil {
			names = fields
		} else {
			values = fields
		}
	}
	var sum uint64
	for _, name := range []string{"TCPMD5NotFound", "TCPMD5Unexpected", "TCPMD5Failure"} {
		if i := slices.Index(names, name); i >= 0 && i < len(values) {
			n, _ := strconv.ParseUint(values[i], 10, 64)
			sum += n
		}
	}
	return sum
}
