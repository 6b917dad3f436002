package bgp

import (
	"errors"
	"log/slog"
	"net/netip"
	"slices"
	"strings"
	"testing"

	"github.com/osrg/gobgp/v3/pkg/log"
	"github.com/osrg/gobgp/v3/pkg/packet/bgp"
)

// Fatal and Panic of gobgp must neither end the process nor unwind the goroutine.
func TestLoggerNeverEndsTheProcess(t *testing.T) {
	var out strings.Builder
	l := &logger{slog.New(slog.NewTextHandler(&out, nil)), func(peerEvent) {}, newWithdrawalTracker()}
	l.Fatal("cannot go on", log.Fields{"Key": "192.0.2.1"})
	l.Panic("code logic bug", nil)
	for _, want := range []string{`level=ERROR msg=gobgp text="cannot go on" Key=192.0.2.1`, `text="code logic bug"`} {
		if !strings.Contains(out.String(), want) {
			t.Errorf("the log lacks %s:\n%s", want, out.String())
		}
	}
}

// Each message of gobgp v3.37.0 that the speaker depends on becomes an event.
func TestLoggerEvents(t *testing.T) {
	peer, failed := netip.MustParseAddr("192.0.2.1"), errors.New("refused")
	var got []peerEvent
	tracker := newWithdrawalTracker()
	l := &logger{slog.New(slog.DiscardHandler), func(ev peerEvent) { got = append(got, ev) }, tracker}
	fields := func(f log.Fields) log.Fields { f["Key"] = "192.0.2.1"; return f }
	cease := log.Fields{"Code": uint8(6), "Subcode": uint8(2), "Communicated-Reason": "bye"}
	malformed := log.Fields{"Data": bgp.NewMessageError(1, 2, nil, "bad length")}
	tracker.peerUp(peer, func(netip.Addr) bool { return true })

	l.Warn("received notification", fields(cease))
	l.Warn("sent notification", fields(malformed))
	l.Warn("failed to set md5", fields(log.Fields{"Err": failed}))
	l.Warn("Mismatched local address", fields(log.Fields{"Addr": "192.0.2.3", "Configured addr": "192.0.2.2"}))
	l.Debug("failed to connect", fields(log.Fields{"Error": failed}))
	l.Debug("failed to connect", fields(log.Fields{"Error": "no error value"}))
	l.Debug("state changed", fields(log.Fields{
		"old": "BGP_FSM_OPENCONFIRM", "new": "BGP_FSM_ESTABLISHED", "reason": "open-msg-negotiated"}))
	if tracker.pending[peer] == nil {
		t.Error("an established session is not tracked")
	}
	l.Debug("state changed", fields(log.Fields{
		"old": "BGP_FSM_ESTABLISHED", "new": "BGP_FSM_IDLE", "reason": "read-failed"}))
	if tracker.pending[peer] != nil {
		t.Error("a lost session is still tracked")
	}
	l.Debug("state changed", log.Fields{"Key": "no address", "new": "BGP_FSM_IDLE"})
	l.Info("other", fields(log.Fields{}))
	l.Warn("other", fields(log.Fields{}))
	notification := func(text string) peerEvent { return peerEvent{peer: peer, kind: eventNotification, text: text} }
	want := []peerEvent{
		notification(`received NOTIFICATION: code 6(cease) subcode 2(administrative shutdown) "bye"`),
		notification("sent NOTIFICATION: bad length"),
		notification("set the password of the listening socket: refused"),
		notification("the peer connects to 192.0.2.3, source is 192.0.2.2"),
		{peer: peer, kind: eventDial, err: failed},
		{peer: peer, kind: eventState, old: "openconfirm", new: "established", text: "open-msg-negotiated"},
		{peer: peer, kind: eventState, old: "established", new: "idle", text: "read-failed"},
	}
	if !slices.Equal(got, want) {
		t.Errorf("got\n%+v\nwant\n%+v", got, want)
	}
}

// All messages of gobgp but those for each UPDATE are passed on, at debug level unless they are errors.
func TestLoggerPassesMessages(t *testing.T) {
	var out strings.Builder
	options := &slog.HandlerOptions{Level: slog.LevelDebug}
	l := &logger{slog.New(slog.NewTextHandler(&out, options)), func(peerEvent) {}, newWithdrawalTracker()}
	for _, row := range []struct {
		write func(string, log.Fields)
		msg   string
		want  string
	}{
		{l.Error, "a", "level=ERROR msg=gobgp text=a B=2 Key=1"},
		{l.Warn, "b", "level=DEBUG msg=gobgp text=b B=2 Key=1"},
		{l.Info, "c", "level=DEBUG msg=gobgp text=c B=2 Key=1"},
		{l.Debug, "d", "level=DEBUG msg=gobgp text=d B=2 Key=1"},
		{l.Debug, "sent update", ""},
	} {
		out.Reset()
		row.write(row.msg, log.Fields{"Key": 1, "B": 2})
		if got := out.String(); !strings.Contains(got, row.want) || (row.want == "") != (got == "") {
			t.Errorf("%s: logged %q, want %q", row.msg, got, row.want)
		}
	}
}
