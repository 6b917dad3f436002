package lb

import (
	"fmt"
	"net/netip"
	"strings"
)

// Question is a packet to explain: the first packet of a flow.
type Question struct {
	Client   netip.AddrPort
	To       netip.AddrPort
	Protocol Protocol
}

// anyPort is the client's port when none is given.
const anyPort = 40000

// ParseQuestion parses a question: client is an address with or without a port, to is VIP:PORT[/PROTOCOL], tcp by
// default.
func ParseQuestion(client, to string) (q Question, err error) {
	if a, err := netip.ParseAddr(client); err == nil {
		q.Client = netip.AddrPortFrom(a.Unmap(), anyPort)
	} else if q.Client, err = netip.ParseAddrPort(client); err != nil {
		return q, fmt.Errorf("client %q: want an address, or an address and a port", client)
	}
	at, protocol, named := strings.Cut(to, "/")
	if q.To, err = netip.ParseAddrPort(at); err != nil {
		return q, fmt.Errorf("%q: want VIP:PORT, or VIP:PORT/PROTOCOL", to)
	}
	q.Protocol = TCP
	if named {
		if err := q.Protocol.UnmarshalText([]byte(protocol)); err != nil {
			return q, fmt.Errorf("%q: %w", to, err)
		}
	}
	if q.Client.Addr().Is4() != q.To.Addr().Is4() {
		return q, fmt.Errorf("%s and %s are of two families", q.Client.Addr(), q.To.Addr())
	}
	return q, nil
}

// Explanation is what the datapath would do with a packet now.
type Explanation struct {
	Client   netip.AddrPort `json:"client"`
	Address  netip.Addr     `json:"address"`
	Port     uint16         `json:"port"`
	Protocol Protocol       `json:"protocol"`
	Service  string         `json:"service,omitempty"`
	Backend  netip.AddrPort `json:"backend,omitzero"` // destination; zero: none
	Forward  Method         `json:"forward,omitempty"`
	// Action, Reason and Meaning are those of the counters (docs/reasons.md).
	Action  string   `json:"action"`
	Reason  string   `json:"reason"`
	Meaning string   `json:"meaning,omitempty"`
	Steps   []string `json:"steps"` // text for operators
}
