package bgp

import (
	"errors"
	"log/slog"
	"net/netip"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	api "github.com/osrg/gobgp/v3/api"
	"github.com/osrg/gobgp/v3/pkg/apiutil"
	"github.com/osrg/gobgp/v3/pkg/packet/bgp"
)

func newTestSpeaker(t *testing.T, log *strings.Builder) (*Speaker, *session) {
	t.Helper()
	o := validOptions()
	o.Peers = []Peer{validPeer()}
	o.Log = slog.New(slog.NewTextHandler(log, nil))
	s, err := New(o)
	if err != nil {
		t.Fatal(err)
	}
	return s, s.sessions[o.Peers[0].Address]
}

func TestRecord(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var log strings.Builder
		s, p := newTestSpeaker(t, &log)
		peer := p.peer.Address
		event := func(ev peerEvent) time.Duration {
			time.Sleep(time.Second)
			ev.peer = peer
			return s.record(ev)
		}
		refused := errors.New("refused")
		event(peerEvent{kind: eventDial, err: refused})
		if !errors.Is(p.dialErr, refused) || p.fault != "" {
			t.Errorf("after a failed dial: %+v", p)
		}
		event(peerEvent{kind: eventNotification, text: "cease"})
		if p.fault != "cease" || p.dialErr != nil || !p.faultAt.Equal(time.Now()) {
			t.Errorf("after a NOTIFICATION: %+v", p)
		}
		if up := event(peerEvent{kind: eventState, old: "openconfirm", new: stateEstablished}); up != 0 {
			t.Errorf("a new session was up for %s", up)
		}
		if p.state != stateEstablished || p.ups != 1 || p.downs != 0 || p.fault != "" || !p.disconnectedAt.IsZero() {
			t.Errorf("after established: %+v", p)
		}
		p.local, p.has4, p.has6 = netip.MustParseAddr("192.0.2.2"), true, true
		time.Sleep(time.Minute)
		up := event(peerEvent{kind: eventState, old: stateEstablished, new: "idle", text: "hold-timer-expired"})
		if up != 61*time.Second || p.ups != 1 || p.downs != 1 || p.local.IsValid() || p.has4 || p.has6 {
			t.Errorf("after the session: up for %s, %+v", up, p)
		}
		now := time.Now()
		if !p.disconnectedAt.Equal(now) || !p.since.Equal(now) || p.fault != faultText("hold-timer-expired") {
			t.Errorf("after the session: %+v", p)
		}
		event(peerEvent{kind: eventState, old: "idle", new: "active", text: "ignored"})
		if p.state != "active" || !p.disconnectedAt.Equal(time.Now().Add(-time.Second)) || p.downs != 1 {
			t.Errorf("after active: %+v", p)
		}
		unknown := peerEvent{peer: netip.MustParseAddr("192.0.2.99"), kind: eventDial, err: refused}
		if up := s.record(unknown); up != 0 || p.dialErr != nil {
			t.Error("an event of an unknown peer changed a session")
		}
	})
}

// A known reason stays for a second against another one, and for ever against none. After a minute of refusals the
// peer is probed for the reason again.
func TestSetFault(t *testing.T) {
	now := time.Now()
	for _, row := range []struct {
		fault string
		age   time.Duration
		text  string
		want  string
	}{
		{"", 0, "new", "new"},
		{"", 0, refusalUnknown, refusalUnknown},
		{"old", time.Second, "new", "old"},
		{"old", time.Second + 1, "new", "new"},
		{"old", time.Minute, refusalUnknown, "old"},
		{"old", time.Minute + 1, refusalUnknown, "old"},
		{"old", time.Hour, closedByPeer, "old"},
		{"old", time.Hour, sendFailed, "old"},
		{"old", time.Hour, connectionLost, "old"},
		{closedByPeer, 0, "new", "new"},
		{closedByPeer, 0, refusalUnknown, refusalUnknown},
	} {
		n := session{fault: row.fault, faultAt: now.Add(-row.age)}
		n.setFault(row.text, now)
		if want := row.text == refusalUnknown && row.age > time.Minute; n.reprobe != want {
			t.Errorf("%q after %s, then %q: probed again: %t", row.fault, row.age, row.text, n.reprobe)
		}
		if n.fault != row.want || (n.fault != row.fault) != n.faultAt.Equal(now) {
			t.Errorf("%q after %s, then %q: %q since %s", row.fault, row.age, row.text, n.fault, now.Sub(n.faultAt))
		}
	}
}

func TestFaultText(t *testing.T) {
	for reason, want := range map[string]string{
		"invalid-msg": refusalUnknown, "read-failed": "the peer closed the connection",
		"write-failed": "the connection failed while sending", "graceful-restart": "the connection was lost",
		"hold-timer-expired": "hold timer expired: no message from the peer", "other": "other",
	} {
		if got := faultText(reason); got != want {
			t.Errorf("%s: %q, want %q", reason, got, want)
		}
	}
}

// A state is logged once; a refusal without a known reason only after 10 s, and a lost session without any not at all.
func TestReport(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var log strings.Builder
		s, p := newTestSpeaker(t, &log)
		for _, row := range []struct {
			name   string
			change func()
			want   string // of the log; "": no line
		}{
			{"nothing known", func() {}, ""},
			{"unknown refusal", func() { p.fault, p.faultAt = refusalUnknown, time.Now() }, ""},
			{"just before 10 s", func() { time.Sleep(10*time.Second - 1) }, ""},
			{"after 10 s", func() { time.Sleep(time.Nanosecond) }, "session down"},
			{"the same", func() {}, ""},
			{"another reason", func() { p.fault = "cease" }, "reason=cease"},
			{"up", func() { p.state = stateEstablished }, `level=INFO msg="bgp session up"`},
			{"up, the same", func() {}, ""},
			{"routes not sent", func() { p.has6, p.nextHops.reason6 = true, "r6" }, "not all routes sent"},
			{"down", func() { p.state = "idle" }, "reason=cease"},
		} {
			log.Reset()
			row.change()
			s.report(p.peer.Address)
			if got := log.String(); (row.want == "") != (got == "") || !strings.Contains(got, row.want) {
				t.Errorf("%s: logged %q, want %q", row.name, got, row.want)
			}
		}
	})
}

func TestFamilies(t *testing.T) {
	multiprotocol := func(f bgp.RouteFamily) bgp.ParameterCapabilityInterface { return bgp.NewCapMultiProtocol(f) }
	v4, v6, other := multiprotocol(bgp.RF_IPv4_UC), multiprotocol(bgp.RF_IPv6_UC), bgp.NewCapRouteRefresh()
	for _, row := range []struct {
		name   string
		caps   []bgp.ParameterCapabilityInterface
		v4, v6 bool
	}{
		{"none", nil, true, false},
		{"no multiprotocol", []bgp.ParameterCapabilityInterface{other}, true, false},
		{"IPv4", []bgp.ParameterCapabilityInterface{v4, other}, true, false},
		{"IPv6", []bgp.ParameterCapabilityInterface{v6}, false, true},
		{"both", []bgp.ParameterCapabilityInterface{v4, v6}, true, true},
		{"both, reversed", []bgp.ParameterCapabilityInterface{v6, v4}, true, true},
		{"IPv4 multicast", []bgp.ParameterCapabilityInterface{multiprotocol(bgp.RF_IPv4_MC)}, false, false},
		{"IPv6 multicast", []bgp.ParameterCapabilityInterface{multiprotocol(bgp.RF_IPv6_MC)}, false, false},
	} {
		caps, err := apiutil.MarshalCapabilities(row.caps)
		if err != nil {
			t.Fatal(err)
		}
		if v4, v6 := families(&api.PeerState{RemoteCap: caps}); v4 != row.v4 || v6 != row.v6 {
			t.Errorf("%s: IPv4 %t, IPv6 %t, want %t, %t", row.name, v4, v6, row.v4, row.v6)
		}
	}
}
