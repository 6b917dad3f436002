package healthd

import (
	"bufio"
	"encoding/binary"
	"encoding/hex"
	"fmt"
	"net/netip"
	"os"
	"strconv"
	"strings"
	"syscall"
)

// notRootError is the error of a check that trusts only root if another user's socket listens at its target. Any user
// may be able to listen on that port, so this counts as a refused connection.
type notRootError struct{ uid uint64 }

func (e notRootError) Error() string {
	return fmt.Sprintf("the listening socket belongs to user %d, not to root", e.uid)
}

func (notRootError) Is(target error) bool { return target == syscall.ECONNREFUSED }

// byRoot returns a notRootError if another user's socket listens at an address of the loopback interface. If it finds
// no socket, the user is unknown: the socket is in another network namespace, or /proc is not readable.
func byRoot(at netip.AddrPort) error {
	if !at.Addr().IsLoopback() {
		return nil
	}
	tables := []string{"tcp6"}
	if at.Addr().Is4() {
		tables = []string{"tcp", "tcp6"} // tcp6 includes dual-stack sockets
	}
	for _, table := range tables {
		if uid, found := listenerIn("/proc/self/net/"+table, at); found && uid != 0 {
			return notRootError{uid}
		} else if found {
			return nil
		}
	}
	return nil
}

const stateListen = "0A"

// listenerIn returns the owner's user id of the socket that listens on an address, from a table such as /proc/net/tcp.
func listenerIn(table string, at netip.AddrPort) (uid uint64, found bool) {
	f, err := os.Open(table)
	if err != nil {
		return 0, false
	}
	defer f.Close()
	lines := bufio.NewScanner(f)
	lines.Scan() // the header
	for lines.Scan() {
		// sl local_address rem_address st tx_queue:rx_queue tr:tm->when retrnsmt uid …
		fields := strings.Fields(lines.Text())
		if len(fields) < 8 || fields[3] != stateListen {
			return 0, false // the kernel lists listening sockets first
		}
		local, ok := parseSocket(fields[1])
		if !ok || local.Port() != at.Port() || !local.Addr().IsUnspecified() && local.Addr() != at.Addr() {
			continue
		}
		uid, err := strconv.ParseUint(fields[7], 10, 32)
		return uid, err == nil
	}
	return 0, false
}

// parseSocket parses the tables' notation of an address and port: 32-bit words in the machine's byte order.
func parseSocket(s string) (netip.AddrPort, bool) {
	host, port, _ := strings.Cut(s, ":")
	b, err := hex.DecodeString(host)
	n, err2 := strconv.ParseUint(port, 16, 16)
	if err != nil || err2 != nil {
		return netip.AddrPort{}, false
	}
	for i := 0; i+4 <= len(b); i += 4 {
		binary.NativeEndian.PutUint32(b[i:], binary.BigEndian.Uint32(b[i:]))
	}
	addr, ok := netip.AddrFromSlice(b)
	return netip.AddrPortFrom(addr.Unmap(), uint16(n)), ok
}
