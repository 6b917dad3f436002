package bgp

import (
	"context"
	"fmt"
	"log/slog"
	"maps"
	"net/netip"
	"slices"
	"strings"

	"github.com/osrg/gobgp/v3/pkg/log"
	"github.com/osrg/gobgp/v3/pkg/packet/bgp"
)

// peerEvent is an event of a peer, read from gobgp's log. gobgp v3 has no other source for the reason of a failed
// connection or session: its own events have states without reasons. The messages below are those of v3.37.0; the tests
// against real peers fail when one of them changes.
type peerEvent struct {
	peer netip.Addr
	kind eventKind
	old  string // eventState: the states, named as in lb.PeerStatus
	new  string
	text string // eventState: gobgp's reason; eventNotification and eventBFD: the fault
	err  error  // eventDial
}

type eventKind uint8

const (
	eventState eventKind = iota
	eventDial
	eventNotification
	eventBFD // the session of BFD failed
)

// logger receives gobgp's log. It extracts events and passes all messages on at debug level: the speaker has messages
// of its own for operators. gobgp calls its methods with locks held, so they must not call gobgp.
type logger struct {
	log         *slog.Logger
	post        func(peerEvent)
	withdrawals *withdrawalTracker
}

// Panic does not panic: gobgp calls it on unknown messages, and the routes of other peers must stay.
func (l *logger) Panic(msg string, f log.Fields) { l.pass(slog.LevelError, msg, f) }

// Fatal does not end the process either.
func (l *logger) Fatal(msg string, f log.Fields) { l.pass(slog.LevelError, msg, f) }
func (l *logger) Error(msg string, f log.Fields) { l.pass(slog.LevelError, msg, f) }

func (l *logger) Warn(msg string, f log.Fields) {
	l.pass(slog.LevelDebug, msg, f)
	switch msg {
	case "received notification":
		l.event(f, peerEvent{kind: eventNotification, text: "received NOTIFICATION: " + notificationText(f)})
	case "sent notification":
		l.event(f, peerEvent{kind: eventNotification, text: "sent NOTIFICATION: " + notificationText(f)})
	case "failed to set md5":
		text := fmt.Sprintf("set the password of the listening socket: %v", f["Err"])
		l.event(f, peerEvent{kind: eventNotification, text: text})
	case "Mismatched local address":
		text := fmt.Sprintf("the peer connects to %v, source is %v", f["Addr"], f["Configured addr"])
		l.event(f, peerEvent{kind: eventNotification, text: text})
	}
}

func (l *logger) Info(msg string, f log.Fields) { l.pass(slog.LevelDebug, msg, f) }

func (l *logger) Debug(msg string, f log.Fields) {
	switch msg {
	case "state changed":
		from, to := stateName(f["old"]), stateName(f["new"])
		if to != stateEstablished {
			l.withdrawals.peerDown(peerOf(f))
		}
		l.event(f, peerEvent{kind: eventState, old: from, new: to, text: fmt.Sprint(f["reason"])})
	case "failed to connect":
		if err, ok := f["Error"].(error); ok {
			l.event(f, peerEvent{kind: eventDial, err: err})
		}
	case "sent update":
		l.withdrawals.updateSent(peerOf(f), f)
		return // one message per route: too many even at debug level
	}
	l.pass(slog.LevelDebug, msg, f)
}

// SetLevel is not used by gobgp itself.
func (l *logger) SetLevel(log.LogLevel) {}

// GetLevel returns debug, because gobgp logs the events at that level.
func (l *logger) GetLevel() log.LogLevel { return log.DebugLevel }

func (l *logger) event(f log.Fields, ev peerEvent) {
	if ev.peer = peerOf(f); ev.peer.IsValid() {
		l.post(ev)
	}
}

func (l *logger) pass(level slog.Level, msg string, f log.Fields) {
	if !l.log.Enabled(context.Background(), level) {
		return
	}
	args := make([]any, 0, 2*len(f)+2)
	args = append(args, "text", msg)
	for _, k := range slices.Sorted(maps.Keys(f)) {
		args = append(args, k, f[k])
	}
	l.log.Log(context.Background(), level, "gobgp", args...)
}

func peerOf(f log.Fields) netip.Addr {
	s, _ := f["Key"].(string)
	a, _ := netip.ParseAddr(s)
	return a
}

// stateEstablished is the FSM state in which routes are exchanged.
const stateEstablished = "established"

// stateName returns "established" for "BGP_FSM_ESTABLISHED".
func stateName(v any) string {
	s, _ := v.(string)
	return strings.ToLower(strings.TrimPrefix(s, "BGP_FSM_"))
}

// notificationText returns the code, subcode and text of a NOTIFICATION (RFC 4271, section 4.5; RFC 9003).
func notificationText(f log.Fields) string {
	if e, ok := f["Data"].(*bgp.MessageError); ok {
		return e.Error()
	}
	code, _ := f["Code"].(uint8)
	subcode, _ := f["Subcode"].(uint8)
	text := bgp.NewNotificationErrorCode(code, subcode).String()
	if message, _ := f["Communicated-Reason"].(string); message != "" {
		text += fmt.Sprintf(" %q", message)
	}
	return text
}
