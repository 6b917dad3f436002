package bgp

import (
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/steelyard-lb/steelyard/announce/bgp/guard"
	"github.com/steelyard-lb/steelyard/announce/loglimit"
	"github.com/steelyard-lb/steelyard/lb/lbtest/must"
)

func newTestSpeaker(t *testing.T, log *strings.Builder) (*Speaker, *session) {
	t.Helper()
	o := validOptions()
	o.Peers = []Peer{validPeer()}
	o.Log = slog.New(slog.NewTextHandler(log, nil))
	s := must.Get(New(o))(t)
	return s, s.sessions[o.Peers[0].Address]
}

// wantLogged checks that log contains want, or is empty if want is "".
func wantLogged(t *testing.T, name, log, want string) {
	t.Helper()
	must.True(t, (want == "") == (log == "") && strings.Contains(log, want), "%s: logged %q, want %q", name, log, want)
}

func TestRecord(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var log strings.Builder
		s, p := newTestSpeaker(t, &log)
		event := func(ev guard.Event) {
			time.Sleep(time.Second)
			ev.Peer = p.peer.Address
			s.record(ev)
		}
		refused := errors.New("refused")
		began := p.disconnectedAt
		event(guard.Event{New: guard.Active, Err: refused, Dial: true})
		must.True(t, errors.Is(p.dialErr, refused) && p.fault == "" && p.disconnectedAt.Equal(began),
			"after a failed attempt to connect: %+v", p)
		event(guard.Event{New: guard.OpenSent})
		time.Sleep(openWait)
		const silent = "connected, but the peer has sent no OPEN for 3s"
		got := p.reason(time.Now())
		must.True(t, p.dialErr == nil && got == silent, "after a connection: %q, %+v", got, p)
		cease := &guard.Error{Code: 6, Subcode: 2, Received: true}
		event(guard.Event{New: guard.Idle, Err: cease})
		must.True(t, p.fault == cease.Error() && p.dialErr == nil && p.faultAt.Equal(time.Now()),
			"after a NOTIFICATION: %+v", p)
		event(guard.Event{New: guard.Established})
		must.True(t, p.state == stateEstablished && p.ups == 1 && p.downs == 0 && p.fault == "" &&
			p.disconnectedAt.IsZero(), "after established: %+v", p)
		time.Sleep(time.Minute)
		event(guard.Event{New: guard.Active, Err: refused})
		must.True(t, p.ups == 1 && p.downs == 1 && p.state == "active" && p.fault == "refused",
			"after the session: %+v", p)
		now := time.Now()
		must.True(t, p.disconnectedAt.Equal(now) && p.since.Equal(now), "after the session: %+v", p)
		event(guard.Event{New: guard.Connect})
		must.True(t, p.state == "connect" && p.disconnectedAt.Equal(now) && p.downs == 1, "after connect: %+v", p)
		s.record(guard.Event{Peer: netip.MustParseAddr("192.0.2.99"), New: guard.Idle, Err: refused, Dial: true})
		must.True(t, p.dialErr == nil, "an event of an unknown peer changed a session")
	})
}

// A session remembers the last ten different errors.
func TestRemember(t *testing.T) {
	var n session
	start := time.Now()
	for i, text := range []string{"a", "b", "a", "c", "d", "e", "f", "g", "h", "i", "j", "k"} {
		n.remember(text, start.Add(time.Duration(i)*time.Second))
	}
	got := ""
	for _, e := range n.errors {
		got += e.Text
	}
	at := n.errors[9].At.Sub(start)
	must.True(t, got == "kjihgfedca" && at == 2*time.Second, "errors %q, the oldest after %v", got, at)
}

// A NOTIFICATION replaces any other reason. An error without a cause replaces only another one without a cause.
func TestSetFault(t *testing.T) {
	old, now := time.Now().Add(-time.Hour), time.Now()
	lost, notification := errors.New("connection lost"), &guard.Error{Code: 6, Subcode: 2, Received: true}
	for _, row := range []struct {
		fault string
		vague bool
		err   error
		want  string
	}{
		{"", false, lost, "connection lost"},
		{"", false, notification, notification.Error()},
		{"cause", false, lost, "cause"},
		{"cause", false, notification, notification.Error()},
		{"closed", true, lost, "connection lost"},
		{"closed", true, notification, notification.Error()},
	} {
		n := session{fault: row.fault, vague: row.vague, faultAt: old}
		n.setFault(row.err, now)
		must.True(t, n.fault == row.want && (n.fault != row.fault) == n.faultAt.Equal(now),
			"%q, then %q: %q since %s", row.fault, row.err, n.fault, now.Sub(n.faultAt))
	}
}

// Each state is logged once. A lost session without a reason is not logged.
func TestReport(t *testing.T) {
	var log strings.Builder
	s, p := newTestSpeaker(t, &log)
	for _, row := range []struct {
		name   string
		change func()
		want   string // in the log; "" for no line
	}{
		{"nothing known", func() {}, ""},
		{"refused", func() { p.fault = "bad peer as" }, "bad peer as"},
		{"the same", func() {}, ""},
		{"another reason", func() { p.fault = "cease" }, "reason=cease"},
		{"up", func() { p.state = stateEstablished }, `level=INFO msg="bgp session up"`},
		{"up, the same", func() {}, ""},
		{"no IPv6 address", func() { p.has6, p.nextHops.reason6 = true, "r6" }, ""},
		{"routes not sent", func() { p.wants6 = true }, "not all routes sent"},
		{"down", func() { p.state = "idle" }, "reason=cease"},
	} {
		log.Reset()
		row.change()
		s.report(p.peer.Address)
		wantLogged(t, row.name, log.String(), row.want)
	}
	s.report(netip.MustParseAddr("192.0.2.99")) // removed in between
}

// A peer whose session ends repeatedly, each time for another reason, does not fill the log, but its last state is
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
		n := strings.Count(out.String(), "bgp session")
		must.True(t, n >= loglimit.Burst && n <= loglimit.Burst+2,
			"%d lines about 2000 changes in 100 s; want %d, and one in a minute", n, loglimit.Burst)
		out.Reset()
		for i := range 90 { // unknown hosts in a range without a password
			stranger := netip.AddrFrom4([4]byte{198, 51, 100, byte(i)})
			of := Peer{Address: stranger, ListenRange: netip.PrefixFrom(stranger, 24).Masked()}
			for range 3 { // each one leaves and returns
				s.sessions[stranger] = newSession(of, p.only, backendFrom(100))
				s.record(guard.Event{Peer: stranger, Old: guard.Idle, New: guard.Established})
				s.report(stranger)
				delete(s.sessions, stranger)
			}
		}
		n = strings.Count(out.String(), "bgp session")
		must.True(t, n <= loglimit.Burst, "%d lines about 90 strangers; want %d", n, loglimit.Burst)
		for range 120 { // poll
			s.report(peer)
			time.Sleep(time.Second)
		}
		last := out.String()
		last = last[max(0, strings.LastIndex(last, "bgp session down")):]
		must.True(t, strings.Contains(last, "reason 999") && strings.Contains(last, "changes_not_logged="),
			"the last state is not in the log:\n%s", last)
	})
}
