package doctor

import (
	"bufio"
	"context"
	"encoding/hex"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"github.com/steelyard-lb/steelyard/lb"
)

// bgpPort is the port of routers.
const bgpPort = 179

// speakers finds BGP sessions that another program on this node has with a peer. From one address, a router keeps only
// one of two sessions, so both flap.
func speakers(_ context.Context, n *Node) ([]lb.Finding, string) {
	if len(n.Peers) == 0 {
		return nil, "there are no BGP peers"
	}
	// Our own sessions may begin and end between these steps.
	own := socketsOf("self")
	var all []connection
	for _, name := range []string{"tcp", "tcp6"} {
		some, _ := connections("/proc/self/net/" + name) // fails without IPv6
		all = append(all, some...)
	}
	own = append(own, socketsOf("self")...)
	var faults []fault
	for _, c := range all {
		peer := slices.IndexFunc(n.Peers, func(p Peer) bool { return p.Peer.WithZone("") == c.remote.Addr() })
		if peer < 0 || slices.Contains(own, c.inode) || c.inode == "0" {
			continue
		}
		if s := n.Peers[peer].Session; s != nil && s.Local != c.local.Addr() {
			continue // the router distinguishes them by their addresses
		}
		if c.remote.Port() == n.Peers[peer].Port || c.local.Port() == bgpPort {
			faults = append(faults, fault{c.remote.Addr().String(), fmt.Sprintf(
				"%s on this node also has a BGP connection to %s", programOf(c.inode), c.remote.Addr())})
		}
	}
	return merged(lb.FoundOtherSpeaker, faults), ""
}

// connection is an established TCP connection of this network namespace.
type connection struct {
	local, remote netip.AddrPort
	inode         string
}

// connections reads a table of proc_pid_net(5).
func connections(name string) (all []connection, err error) {
	f, err := os.Open(name)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	lines := bufio.NewScanner(f)
	for lines.Scan() {
		const local, remote, state, inode, established = 1, 2, 3, 9, "01"
		if x := strings.Fields(lines.Text()); len(x) > inode && x[state] == established {
			all = append(all, connection{kernelAddr(x[local]), kernelAddr(x[remote]), x[inode]})
		}
	}
	return all, lines.Err()
}

// kernelAddr parses an address of /proc/net/tcp: words of 32 bits in the machine's byte order (little endian on all
// supported machines), and the port.
func kernelAddr(text string) netip.AddrPort {
	address, port, _ := strings.Cut(text, ":")
	b, err := hex.DecodeString(address)
	if err != nil {
		return netip.AddrPort{}
	}
	for i := 0; i+4 <= len(b); i += 4 {
		slices.Reverse(b[i : i+4])
	}
	a, _ := netip.AddrFromSlice(b)
	n, _ := strconv.ParseUint(port, 16, 16)
	return netip.AddrPortFrom(a.Unmap(), uint16(n))
}

// socketsOf returns the inodes of a process's sockets.
func socketsOf(pid string) (inodes []string) {
	names, _ := filepath.Glob("/proc/" + pid + "/fd/*")
	for _, name := range names {
		to, _ := os.Readlink(name)
		if inode, ok := strings.CutPrefix(to, "socket:["); ok {
			inodes = append(inodes, strings.TrimSuffix(inode, "]"))
		}
	}
	return inodes
}

// programOf returns the name of the process that has a socket. In a container, processes outside it are not visible.
func programOf(inode string) string {
	names, _ := filepath.Glob("/proc/[0-9]*")
	for _, name := range names {
		pid := filepath.Base(name)
		if slices.Contains(socketsOf(pid), inode) {
			comm, _ := os.ReadFile(name + "/comm")
			return fmt.Sprintf("%s (process %s)", strings.TrimSpace(string(comm)), pid)
		}
	}
	return "another program"
}
