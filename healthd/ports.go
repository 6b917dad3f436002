package healthd

import (
	"bufio"
	"fmt"
	"net/netip"
	"os"
	"strconv"
	"strings"

	"github.com/steelyard-lb/steelyard/lb"
)

// PortUser says what this machine uses a port of its own address for, or returns "": a process waits for clients there,
// or the kernel gives the port to connections that the machine opens, whose replies would be taken for clients'
// packets. It does not know sockets of SCTP.
func PortUser(at netip.AddrPort, protocol lb.Protocol) string {
	tables, state := []string{"udp", "udp6"}, "07" // TCP_CLOSE: not connected
	switch protocol {
	case lb.TCP:
		tables, state = []string{"tcp", "tcp6"}, stateListen
	case lb.SCTP:
		return ""
	}
	for _, table := range tables {
		if on := waiting("/proc/self/net/"+table, state, at); on.IsValid() {
			return fmt.Sprintf("a process of the node listens on %s", on)
		}
	}
	const ports, reserved = "/proc/sys/net/ipv4/ip_local_port_range", "/proc/sys/net/ipv4/ip_local_reserved_ports"
	text, _ := os.ReadFile(ports)
	if f := strings.Fields(string(text)); len(f) == 2 && within(f[0]+"-"+f[1], at.Port()) {
		if text, _ := os.ReadFile(reserved); !within(strings.TrimSpace(string(text)), at.Port()) {
			return fmt.Sprintf("the node uses ports %s-%s for its own connections; reserve the port with "+
				"sysctl net.ipv4.ip_local_reserved_ports", f[0], f[1])
		}
	}
	return ""
}

// within reports whether a list such as "8080,9000-9100" has a port.
func within(list string, port uint16) bool {
	for part := range strings.SplitSeq(list, ",") {
		first, last, isRange := strings.Cut(part, "-")
		if !isRange {
			last = first
		}
		low, err := strconv.ParseUint(first, 10, 16)
		high, err2 := strconv.ParseUint(last, 10, 16)
		if err == nil && err2 == nil && low <= uint64(port) && uint64(port) <= high {
			return true
		}
	}
	return false
}

// waiting returns the local address of a socket that receives what new clients send to at, from a table of
// proc_pid_net(5), or zero.
func waiting(table, state string, at netip.AddrPort) netip.AddrPort {
	f, err := os.Open(table)
	if err != nil {
		return netip.AddrPort{}
	}
	defer f.Close()
	lines := bufio.NewScanner(f)
	lines.Scan() // the header
	for lines.Scan() {
		const local, status = 1, 3
		x := strings.Fields(lines.Text())
		if len(x) <= status {
			break
		}
		if x[status] != state {
			if state == stateListen {
				break // the kernel lists listening sockets first
			}
			continue
		}
		on, ok := parseSocket(x[local])
		any := on.Addr().IsUnspecified() && (on.Addr().Is6() || at.Addr().Is4()) // [::] is for IPv4 as well
		if ok && on.Port() == at.Port() && (any || on.Addr() == at.Addr()) {
			return on
		}
	}
	return netip.AddrPort{}
}
