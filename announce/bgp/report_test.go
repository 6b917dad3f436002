package bgp

import (
	"fmt"
	"net/netip"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/steelyard-lb/steelyard/announce/bgp/guard"
	"github.com/steelyard-lb/steelyard/announce/loglimit"
)

// A peer whose session ends again and again, each time for another reason, fills no log. What it is in the end is
// logged.
func TestReportIsLimited(t *testing.T) {
	var out strings.Builder
	s, p, srv := withServer(t, &out)
	srv.stop()
	out.Reset()
	synctest.Test(t, func(t *testing.T) {
		peer := p.peer.Address
		for i := range 1000 {
			up := guard.Event{Peer: peer, Old: guard.Idle, New: guard.Established}
			down := guard.Event{Peer: peer, Old: guard.Established, New: guard.Idle, Err: fmt.Errorf("reason %d", i)}
			for _, ev := range []guard.Event{up, down} {
				s.record(ev)
				s.report(peer)
			}
			time.Sleep(100 * time.Millisecond)
		}
		if n := strings.Count(out.String(), "bgp session"); n < loglimit.Burst || n > loglimit.Burst+2 {
			t.Errorf("%d lines about 2000 changes in 100 s; want %d, and one in a minute", n, loglimit.Burst)
		}
		out.Reset()
		for i := range 90 { // strangers in a range, which need no password
			stranger := netip.AddrFrom4([4]byte{198, 51, 100, byte(i)})
			of := Peer{Address: stranger, ListenRange: netip.PrefixFrom(stranger, 24).Masked()}
			for range 3 { // each one leaves, and comes again
				s.sessions[stranger] = newSession(of, p.only, backendFrom(100))
				s.record(guard.Event{Peer: stranger, Old: guard.Idle, New: guard.Established})
				s.report(stranger)
				delete(s.sessions, stranger)
			}
		}
		if n := strings.Count(out.String(), "bgp session"); n > loglimit.Burst {
			t.Errorf("%d lines about 90 strangers; want %d", n, loglimit.Burst)
		}
		for range 120 { // poll
			s.report(peer)
			time.Sleep(time.Second)
		}
		last := out.String()
		if i := strings.LastIndex(last, "bgp session down"); i < 0 || !strings.Contains(last[i:], "reason 999") ||
			!strings.Contains(last[i:], "changes_not_logged=") {
			t.Errorf("the last state is not in the log:\n%s", last)
		}
	})
}
