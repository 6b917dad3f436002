package lb

import (
	"cmp"
	"fmt"
	"net/netip"
	"strings"
)

// Question is a packet to explain. It is the first packet of a flow.
type Question struct {
	Client   netip.AddrPort
	To       netip.AddrPort
	Protocol Protocol
}

// anyPort is the client's port if none is given.
const anyPort = 40000

// inBrackets describes what an address with a port needs, for error messages.
const inBrackets = "an IPv6 address in brackets and a port of at most 65535"

// ParseQuestion parses a question. client is an address with or without a port; to is VIP:PORT[/PROTOCOL], with tcp as
// the default.
func ParseQuestion(client, to string) (q Question, err error) {
	if a, err := netip.ParseAddr(client); err == nil {
		q.Client = netip.AddrPortFrom(a.Unmap(), anyPort)
	} else if q.Client, err = netip.ParseAddrPort(client); err != nil {
		return q, fmt.Errorf("client %q: want an address, or ADDRESS:PORT with %s", client, inBrackets)
	}
	at, protocol, named := strings.Cut(to, "/")
	if q.To, err = netip.ParseAddrPort(at); err != nil {
		return q, fmt.Errorf("%q: want VIP:PORT, or VIP:PORT/PROTOCOL, with %s", to, inBrackets)
	}
	q.Protocol = TCP
	if named {
		if err := q.Protocol.UnmarshalText([]byte(protocol)); err != nil {
			return q, fmt.Errorf("%q: %w", to, err)
		}
	}
	if q.Client.Addr().Is4() != q.To.Addr().Is4() {
		return q, fmt.Errorf("%s and %s have different address families", q.Client.Addr(), q.To.Addr())
	}
	return q, nil
}

// Explanation is what the datapath would do with a packet now.
type Explanation struct {
	Scope    Scope          `json:"scope"`
	Client   netip.AddrPort `json:"client"`
	Address  netip.Addr     `json:"address"`
	Port     uint16         `json:"port"`
	Protocol Protocol       `json:"protocol"`
	Service  string         `json:"service,omitempty"`
	Backend  netip.AddrPort `json:"backend,omitzero"` // destination, or zero
	// Endpoints are the possible destinations, if the service proxy selects one at random.
	Endpoints []netip.AddrPort `json:"endpoints,omitempty"`
	Forward   Method           `json:"forward,omitempty"`
	// Action, Reason and Meaning are listed in docs/reasons.md.
	Action  string `json:"action"`
	Reason  string `json:"reason"`
	Meaning string `json:"meaning,omitempty"`
	// Reply is "forwarded" if the server's reply would reach the client through this node, "none" if it does not pass
	// through this node, or the reason why it would be dropped.
	Reply string `json:"reply,omitempty"`
	// Fault is why the client would get no answer although the service has backends, or "".
	Fault string `json:"fault,omitempty"`
	// Route is how the address is announced, or nil if no service has it.
	Route *RouteStatus `json:"route,omitempty"`
	Peers []PeerStatus `json:"peers,omitempty"`
	// Out lists the service's backends that receive no new flows, each with its reason.
	Out   []BackendStatus `json:"backends_out,omitempty"`
	Steps []string        `json:"steps"` // text for operators
}

// Surround adds the route and the peers of the address, and which backends receive no new flows.
func (e *Explanation) Surround(s Status, peers []PeerStatus) {
	say := func(format string, args ...any) { e.Steps = append(e.Steps, fmt.Sprintf(format, args...)) }
	for _, row := range s.Services {
		if row.Address != e.Address || row.Protocol != e.Protocol || e.Port < row.Port ||
			e.Port > max(row.Port, row.LastPort) {
			continue
		}
		for _, b := range row.Backends {
			if b.State == StateHealthy {
				continue
			}
			e.Out = append(e.Out, b)
			say("backend %s gets no new flows: %s: %s", netip.AddrPortFrom(b.Address, b.Port), b.State,
				cmp.Or(b.Reason, "no result of its check yet"))
		}
	}
	for _, r := range s.Routes {
		if r.Address != e.Address {
			continue
		}
		e.Route = &r
		switch {
		case r.Reason == "":
			say("%s is %s", r.Address, r.State)
		case r.State == RouteAnnounced:
			say("%s is announced %s", r.Address, r.Reason) // with a lower preference, and why
		default:
			say("%s is not announced: %s: %s", r.Address, r.State, r.Reason)
		}
	}
	e.Peers = peers
	for _, p := range peers {
		say("peer %s: %s, %d routes%s", p.Peer, p.State, p.Routes, after(": ", p.LastError))
	}
}

// after returns text behind a separator, or "" if text is empty.
func after(separator, text string) string {
	if text == "" {
		return ""
	}
	return separator + text
}
