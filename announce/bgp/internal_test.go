package bgp

import (
	"context"
	"errors"
	"log/slog"
	"net/netip"
	"os"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/osrg/gobgp/v3/pkg/log"
	"github.com/osrg/gobgp/v3/pkg/packet/bgp"
	"github.com/steelyard-lb/steelyard/lb"
)

func announce(pairs ...any) (list []lb.Announcement) {
	for i := 0; i < len(pairs); i += 2 {
		a, _ := netip.ParseAddr(pairs[i].(string))
		list = append(list, lb.Announcement{VIP: a, Weight: pairs[i+1].(int)})
	}
	return list
}

func TestRoutesFor(t *testing.T) {
	for _, row := range []struct {
		name   string
		v4, v6 int
		in     []lb.Announcement
		want   map[string]int
		err    string
	}{
		{"nothing", 32, 128, nil, map[string]int{}, ""},
		{"hosts", 32, 128, announce("203.0.113.1", 2, "2001:db8::1", 3), map[string]int{"203.0.113.1/32": 2, "2001:db8::1/128": 3}, ""},
		{"mapped and zoned", 32, 128, announce("::ffff:203.0.113.1", 1, "2001:db8::1%eth0", 1), map[string]int{"203.0.113.1/32": 1, "2001:db8::1/128": 1}, ""},
		{"a weight below one counts as one", 32, 128, announce("203.0.113.1", 0), map[string]int{"203.0.113.1/32": 1}, ""},
		{"weights add up", 24, 64, announce("203.0.113.1", 2, "203.0.113.2", 3, "2001:db8::1", 1, "2001:db8::2", 1), map[string]int{"203.0.113.0/24": 5, "2001:db8::/64": 2}, ""},
		{"what cannot be routed", 32, 128, announce("", 1, "0.0.0.0", 1, "127.0.0.1", 1, "224.0.0.1", 1, "fe80::1", 1, "::", 1, "255.255.255.255", 1, "203.0.113.1", 1), map[string]int{"203.0.113.1/32": 1},
			"announce invalid IP: not a global unicast address\nannounce 0.0.0.0: not a global unicast address\nannounce 127.0.0.1: not a global unicast address\nannounce 224.0.0.1: not a global unicast address\nannounce fe80::1: not a global unicast address\nannounce ::: not a global unicast address\nannounce 255.255.255.255: not a global unicast address"},
	} {
		t.Run(row.name, func(t *testing.T) {
			o := Options{AggregateV4: row.v4, AggregateV6: row.v6}
			routes, err := o.routesFor(row.in)
			got := map[string]int{}
			for p, w := range routes {
				got[p.String()] = w
			}
			if diff := cmp.Diff(row.want, got); diff != "" {
				t.Errorf("-want +got:\n%s", diff)
			}
			if text := errText(err); text != row.err {
				t.Errorf("error\n%s\nwant\n%s", text, row.err)
			}
		})
	}
}

func errText(err error) string {
	if err == nil {
		return ""
	}
	return err.Error()
}

func TestChanges(t *testing.T) {
	p := netip.MustParsePrefix
	from := routes{p("203.0.113.1/32"): 1, p("203.0.113.2/32"): 1, p("203.0.113.3/32"): 1}
	to := routes{p("203.0.113.0/32"): 1, p("203.0.113.2/32"): 2, p("203.0.113.3/32"): 1}
	for _, row := range []struct {
		weighted bool
		want     []change
	}{
		{false, []change{{p("203.0.113.1/32"), 0}, {p("203.0.113.0/32"), 1}}},
		{true, []change{{p("203.0.113.1/32"), 0}, {p("203.0.113.0/32"), 1}, {p("203.0.113.2/32"), 2}}},
	} {
		o := Options{Weighted: row.weighted}
		got := o.changes(from, to)
		if diff := cmp.Diff(row.want, got, cmp.AllowUnexported(change{}), cmp.Comparer(func(a, b netip.Prefix) bool { return a == b })); diff != "" {
			t.Errorf("weighted=%v, -want +got:\n%s", row.weighted, diff)
		}
	}
}

// Set waits for what is withdrawn to be written, to peers that have a session and take that family.
func TestWire(t *testing.T) {
	v4, v6 := netip.MustParsePrefix("203.0.113.1/32"), netip.MustParsePrefix("2001:db8::1/128")
	all, only4 := netip.MustParseAddr("192.0.2.1"), netip.MustParseAddr("192.0.2.5")
	withdraw4 := log.Fields{"withdrawals": []*bgp.IPAddrPrefix{bgp.NewIPAddrPrefix(32, "203.0.113.1")}}
	withdraw6 := log.Fields{"attributes": []bgp.PathAttributeInterface{
		bgp.NewPathAttributeMpUnreachNLRI([]bgp.AddrPrefixInterface{bgp.NewIPv6AddrPrefix(128, "2001:db8::1")})}}
	news := log.Fields{"nlri": []*bgp.IPAddrPrefix{bgp.NewIPAddrPrefix(32, "203.0.113.2")}}
	gone, cancel := context.WithCancel(t.Context())
	cancel()
	for _, row := range []struct {
		name string
		do   func(w *wire)
		left int // 0: wait returns by itself
	}{
		{"nothing written", func(*wire) {}, 3},
		{"something else written", func(w *wire) { w.sent(all, news); w.sent(only4, news) }, 3},
		{"one peer", func(w *wire) { w.sent(all, withdraw4); w.sent(all, withdraw6) }, 1},
		{"both", func(w *wire) { w.sent(all, withdraw4); w.sent(all, withdraw6); w.sent(only4, withdraw4) }, 0},
		{"one session is lost", func(w *wire) { w.sent(all, withdraw4); w.sent(all, withdraw6); w.down(only4) }, 0},
		{"everything is told anew", func(w *wire) { w.sent(all, log.Fields{}); w.sent(only4, log.Fields{}) }, 0},
		{"everything is told anew, IPv6", func(w *wire) {
			w.sent(all, log.Fields{"attributes": []bgp.PathAttributeInterface{bgp.NewPathAttributeMpUnreachNLRI(nil)}})
			w.down(only4)
		}, 0},
	} {
		t.Run(row.name, func(t *testing.T) {
			w := newWire()
			w.up(all, func(netip.Addr) bool { return true })
			w.up(only4, netip.Addr.Is4)
			w.expect([]netip.Prefix{v4, v6})
			row.do(w)
			ctx := gone
			if row.left == 0 {
				ctx = t.Context()
			}
			if left := w.left(); left != row.left {
				t.Errorf("%d withdrawals left, want %d", left, row.left)
			}
			if left := w.wait(ctx); left != row.left {
				t.Errorf("wait gave %d up, want %d", left, row.left)
			}
			if left := w.left(); left != 0 {
				t.Errorf("%d withdrawals left after wait", left)
			}
		})
	}
}

func TestParseMD5Dropped(t *testing.T) {
	for _, row := range []struct {
		text string
		want uint64
	}{
		{"TcpExt: SyncookiesSent TCPMD5NotFound TCPMD5Unexpected TCPMD5Failure\nTcpExt: 9 1 20 300\nIpExt: InNoRoutes\nIpExt: 7\n", 321},
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
			t.Error("this kernel does not count MD5 failures under the name we look for")
		}
	}
}

func TestReason(t *testing.T) {
	now := time.Now()
	peer := Peer{Address: netip.MustParseAddr("192.0.2.1"), Port: 179}
	for _, row := range []struct {
		name string
		e    session
		want string
	}{
		{"new", session{peer: peer, state: "idle"}, ""},
		{"refused", session{peer: peer, state: "active", noTCP: now.Add(-10 * time.Second), dial: os.NewSyscallError("connect", syscall.ECONNREFUSED)},
			"no TCP connection to 192.0.2.1:179 for 10s: connection refused"},
		{"no answer", session{peer: peer, state: "active", noTCP: now.Add(-10 * time.Second), dial: os.ErrDeadlineExceeded, md5Dropped: 1 << 60},
			"no TCP connection to 192.0.2.1:179 for 10s: no answer; if the peer is up, check the password (MD5) on both sides"},
		{"refused after a fault", session{peer: peer, state: "active", noTCP: now, dial: syscall.ECONNREFUSED, fault: "the peer says: x", faultAt: now},
			"no TCP connection to 192.0.2.1:179 for 0s: connection refused; before that: the peer says: x"},
		{"refused long after a fault", session{peer: peer, state: "active", noTCP: now, dial: syscall.ECONNREFUSED, fault: "the peer says: x", faultAt: now.Add(-time.Hour)},
			"no TCP connection to 192.0.2.1:179 for 0s: connection refused"},
		{"fault", session{peer: peer, state: "idle", fault: "the peer says: x"}, "the peer says: x"},
		{"up", session{peer: peer, state: "established", fault: "old", dial: errors.New("old"), has6: true}, ""},
		{"up without next hop", session{peer: peer, state: "established", has6: true, hops: nextHops{reason6: "r6", reason4: "r4"}}, "r6"},
	} {
		if got := row.e.reason(now); got != row.want {
			t.Errorf("%s: %q, want %q", row.name, got, row.want)
		}
	}
}

// gobgp's Fatal and Panic must neither end the process nor unwind its goroutine.
func TestLoggerNeverEndsTheProcess(t *testing.T) {
	var out strings.Builder
	l := &logger{log: slog.New(slog.NewTextHandler(&out, nil)), tell: func(fact) {}, wire: newWire()}
	l.Fatal("cannot go on", log.Fields{"Key": "192.0.2.1"})
	l.Panic("code logic bug", nil)
	for _, want := range []string{`level=ERROR msg=gobgp text="cannot go on" Key=192.0.2.1`, `text="code logic bug"`} {
		if !strings.Contains(out.String(), want) {
			t.Errorf("the log lacks %s:\n%s", want, out.String())
		}
	}
}
