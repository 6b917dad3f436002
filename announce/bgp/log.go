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

// fact is something that gobgp says of a peer in its log. gobgp v3 has no other way to learn why a connection or a
// session failed: its events carry states without reasons. The texts below are those of v3.37.0, and the tests against
// real peers fail when one of them changes.
type fact struct {
	peer netip.Addr
	kind factKind
	old  string // factState: the states, as lb.PeerStatus has them
	new  string
	text string // factState: gobgp's reason; factNotification: what was said
	err  error  // factDial
}

type factKind uint8

const (
	factState factKind = iota
	factDial
	factNotification
)

// logger is what gobgp logs to. It takes the facts out and passes everything on at debug level, for the speaker logs
// itself what an operator should know. Its methods are called with gobgp's locks held: they must not call gobgp.
type logger struct {
	log  *slog.Logger
	tell func(fact)
	wire *wire
}

// Panic does not: gobgp calls it on messages it does not understand, and the routes of all other peers must survive.
func (l *logger) Panic(msg string, f log.Fields) { l.pass(slog.LevelError, msg, f) }

// Fatal does not end the process either.
func (l *logger) Fatal(msg string, f log.Fields) { l.pass(slog.LevelError, msg, f) }
func (l *logger) Error(msg string, f log.Fields) { l.pass(slog.LevelError, msg, f) }

func (l *logger) Warn(msg string, f log.Fields) {
	l.pass(slog.LevelDebug, msg, f)
	switch msg {
	case "received notification":
		l.fact(f, fact{kind: factNotification, text: "the peer says: " + notificationText(f)})
	case "sent notification":
		l.fact(f, fact{kind: factNotification, text: "we told the peer: " + notificationText(f)})
	case "failed to set md5":
		l.fact(f, fact{kind: factNotification, text: fmt.Sprintf("set the password of the listening socket: %v", f["Err"])})
	case "Mismatched local address":
		l.fact(f, fact{kind: factNotification, text: fmt.Sprintf("the peer dials %v, source is %v", f["Addr"], f["Configured addr"])})
	}
}

func (l *logger) Info(msg string, f log.Fields) { l.pass(slog.LevelDebug, msg, f) }

func (l *logger) Debug(msg string, f log.Fields) {
	switch msg {
	case "state changed":
		from, to := stateWord(f["old"]), stateWord(f["new"])
		if to != stateEstablished {
			l.wire.down(peerOf(f))
		}
		l.fact(f, fact{kind: factState, old: from, new: to, text: fmt.Sprint(f["reason"])})
	case "failed to connect":
		if err, ok := f["Error"].(error); ok {
			l.fact(f, fact{kind: factDial, err: err})
		}
	case "sent update":
		l.wire.sent(peerOf(f), f)
		return // one a route: too much even for debugging
	}
	l.pass(slog.LevelDebug, msg, f)
}

// SetLevel is not used by gobgp itself.
func (l *logger) SetLevel(log.LogLevel) {}

// GetLevel says debug, for the facts are told at that level.
func (l *logger) GetLevel() log.LogLevel { return log.DebugLevel }

func (l *logger) fact(f log.Fields, what fact) {
	if what.peer = peerOf(f); what.peer.IsValid() {
		l.tell(what)
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

// stateEstablished is the state in which routes are exchanged.
const stateEstablished = "established"

// stateWord makes "established" of "BGP_FSM_ESTABLISHED".
func stateWord(v any) string {
	s, _ := v.(string)
	return strings.ToLower(strings.TrimPrefix(s, "BGP_FSM_"))
}

// notificationText says what a NOTIFICATION says (RFC 4271, section 4.5; RFC 9003 for the free text).
func notificationText(f log.Fields) string {
	if e, ok := f["Data"].(*bgp.MessageError); ok {
		return e.Error()
	}
	code, _ := f["Code"].(uint8)
	subcode, _ := f["Subcode"].(uint8)
	text := bgp.NewNotificationErrorCode(code, subcode).String()
	if said, _ := f["Communicated-Reason"].(string); said != "" {
		text += fmt.Sprintf(" %q", said)
	}
	return text
}
