package cli

import (
	"encoding/json"
	"fmt"
	"io"
	"net/netip"
	"net/url"
	"strings"
	"text/tabwriter"
	"time"

	ucli "github.com/urfave/cli/v2"

	"github.com/steelyard-lb/steelyard/lb"
)

// peers returns a list command that can show the details of one BGP peer.
func (e *env) peers() *ucli.Command {
	cmd := e.list("peers", "BGP neighbours", "/v1/peers", peersTable)
	cmd.Flags = append(cmd.Flags, &ucli.StringFlag{
		Name: "peer", Usage: "print what the session with the BGP peer `ADDRESS` has negotiated and exchanged",
	})
	all := cmd.Action
	cmd.Action = func(c *ucli.Context) error {
		if !c.IsSet("peer") {
			return all(c)
		}
		return e.showPeer(c, "/v1/peers", peerDetails)
	}
	return cmd
}

// showPeer shows the API's response to path for the peer of --peer.
func (e *env) showPeer(c *ucli.Context, path string, table func(w io.Writer, answer []byte) error) error {
	peer, err := netip.ParseAddr(c.String("peer"))
	if err != nil {
		return fmt.Errorf("%w: --peer %s: want an address", errUsage, c.String("peer"))
	}
	return e.show(c, path+"?"+url.Values{"peer": {peer.String()}}.Encode(), table)
}

func peersTable(w io.Writer, answer []byte) error {
	return rows(w, answer, "PEER\tASN\tSTATE\tROUTES\tSINCE\tREASON", func(p lb.PeerStatus) []any {
		return []any{p.Peer, asnOf(p), p.State, p.Routes, ago(p.Since), dash(p.LastError)}
	})
}

func peerDetails(w io.Writer, answer []byte) error {
	var all []lb.PeerStatus
	if err := json.Unmarshal(answer, &all); err != nil {
		return fmt.Errorf("read the response: %w", err)
	}
	tw := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	line := func(name, format string, args ...any) {
		writeRow(tw, name, fmt.Sprintf(format, args...))
	}
	for _, p := range all {
		line("peer", "%v, AS %s", p.Peer, asnOf(p))
		line("state", "%s for %s, ended sessions: %d", p.State, ago(p.Since), p.Flaps)
		if p.LastError != "" {
			line("reason", "%s", p.LastError)
		}
		if s := p.Session; s != nil {
			sessionDetails(line, p, s)
		}
		if p.BFD != "" {
			line("bfd", "%s", p.BFD)
		}
		for _, e := range p.Errors {
			line("error", "%s ago: %s", ago(e.At), e.Text)
		}
	}
	return tw.Flush()
}

func sessionDetails(line func(name, format string, args ...any), p lb.PeerStatus, s *lb.PeerSession) {
	line("router ID", "%v", s.RouterID)
	line("this node", "%v, AS %d", s.Local, s.LocalASN)
	families := strings.Join(s.Families, ", ")
	if s.ExtendedNextHop {
		families += "; IPv6 next hops of IPv4 routes"
	}
	line("families", "%s", families)
	line("hold time", "%s, keepalive %s", duration(s.Hold, "none"), duration(s.Keepalive, "none"))
	line("routes kept", "%s with graceful restart, %s with long-lived graceful restart",
		duration(s.Restart, "not"), duration(s.LongLived, "not"))
	line("sent", "%d messages, %d updates, the last %s ago; %d routes", s.Sent.Messages, s.Sent.Updates,
		ago(s.Sent.Last), p.Routes)
	line("received", "%d messages, %d updates, the last %s ago; %d routes, discarded", s.Received.Messages,
		s.Received.Updates, ago(s.Received.Last), p.Received)
}

func dash(s string) string {
	if s == "" {
		return "-"
	}
	return s
}

// duration formats a number of seconds; none is the text for 0.
func duration(seconds float64, none string) string {
	if seconds == 0 {
		return none
	}
	return time.Duration(seconds * float64(time.Second)).String()
}

func asnOf(p lb.PeerStatus) string {
	if p.ASN == 0 {
		return "external" // not known before the first session
	}
	return fmt.Sprint(p.ASN)
}
