package lb

import (
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strconv"
	"strings"
)

// FlowStatus is one flow in the kernel's flow tables. After the first packet, only a sample of a direct-return flow's
// packets (dsr, tunnel) is recorded, so such a flow appears late and Idle is approximate.
type FlowStatus struct {
	Scope    Scope          `json:"scope"`
	Service  string         `json:"service,omitempty"` // "" if the service was deleted
	Client   netip.AddrPort `json:"client"`
	Address  netip.Addr     `json:"address"`
	Port     uint16         `json:"port"`
	Protocol Protocol       `json:"protocol"`
	Backend  netip.AddrPort `json:"backend,omitzero"`
	Source   netip.AddrPort `json:"source,omitzero"` // with nat: the source that the backend sees
	Forward  Method         `json:"forward"`
	State    FlowState      `json:"state"`
	Idle     float64        `json:"idle_seconds"` // since its last packet
	// The rest is known with nat only, because replies of direct-return flows do not pass.
	Age        float64     `json:"age_seconds,omitzero"` // since its first packet
	FromClient FlowFigures `json:"from_client,omitzero"`
	FromServer FlowFigures `json:"from_server,omitzero"`
	// Handshake is the time from the client's first SYN to the server's SYN-ACK (TCP), or from INIT to INIT-ACK (SCTP).
	Handshake float64 `json:"handshake_seconds,omitzero"`
}

// FlowFigures are the figures of one direction of a flow.
type FlowFigures struct {
	Packets uint64 `json:"packets"`
	Bytes   uint64 `json:"bytes"` // without headers; of TCP, each counted once; not of SCTP
	// Retransmissions is the number of TCP segments without new bytes. It includes segments that arrive in the wrong
	// order.
	Retransmissions uint32 `json:"retransmissions,omitzero"`
}

// Scope says whose connections a flow or rule is for.
type Scope string

// The scopes.
const (
	ScopeOutside Scope = "outside" // of other machines to VIPs
	ScopeInside  Scope = "inside"  // of this node and its pods to Services
	ScopeNode    Scope = "node"    // of other machines to this node's own addresses (node ports)
)

// Scopes lists all scopes.
var Scopes = []Scope{ScopeOutside, ScopeInside, ScopeNode}

// FlowState is the state of a flow.
type FlowState string

// The states of a flow.
const (
	FlowHalfOpen    FlowState = "half-open" // the client has not completed the handshake
	FlowEstablished FlowState = "established"
	FlowClosing     FlowState = "closing" // one side has closed
	FlowClosed      FlowState = "closed"  // both sides have closed
)

// FlowStates lists all states.
var FlowStates = []FlowState{FlowHalfOpen, FlowEstablished, FlowClosing, FlowClosed}

// FlowFilter selects flows. A zero field matches every flow.
type FlowFilter struct {
	Scope   Scope
	Service string
	Client  netip.Prefix
	Backend netip.Addr
	Address netip.Addr
	Port    uint16
	State   FlowState
	// Limit is the maximum number of flows to return. 0 means no limit.
	Limit int
}

// Match reports whether w selects f.
func (w FlowFilter) Match(f FlowStatus) bool {
	return (w.Scope == "" || w.Scope == f.Scope) &&
		(w.Service == "" || w.Service == f.Service) &&
		(!w.Client.IsValid() || w.Client.Contains(f.Client.Addr())) &&
		(!w.Backend.IsValid() || w.Backend == f.Backend.Addr()) &&
		(!w.Address.IsValid() || w.Address == f.Address) &&
		(w.Port == 0 || w.Port == f.Port) &&
		(w.State == "" || w.State == f.State)
}

// Set sets the field called name from text. API query parameters and command line flags use these names.
func (w *FlowFilter) Set(name, value string) (err error) {
	switch name {
	case "scope":
		if w.Scope = Scope(value); !slices.Contains(Scopes, w.Scope) {
			err = fmt.Errorf("allowed: %s", Words(Scopes))
		}
	case "service":
		w.Service = value
	case "client":
		w.Client, err = parsePrefix(value)
	case "backend":
		w.Backend, err = parseAddr(value)
	case "address":
		w.Address, err = parseAddr(value)
	case "port":
		w.Port, err = parsePort(value)
	case "state":
		if w.State = FlowState(value); !slices.Contains(FlowStates, w.State) {
			err = fmt.Errorf("allowed: %s", Words(FlowStates))
		}
	case "limit":
		w.Limit, err = parseLimit(value)
	default:
		return fmt.Errorf("unknown filter %q; allowed: %s", name, strings.Join(FlowFilters, ", "))
	}
	if err != nil {
		return fmt.Errorf("%s %q: %w", name, value, err)
	}
	return nil
}

// FlowFilters lists the names that FlowFilter.Set accepts.
var FlowFilters = []string{"scope", "service", "client", "backend", "address", "port", "state", "limit"}

// parsePort parses a port: decimal digits only, 0 to 65535.
func parsePort(s string) (uint16, error) {
	n, err := strconv.ParseUint(s, 10, 16)
	if err != nil {
		return 0, errors.New("want a decimal number from 0 to 65535")
	}
	return uint16(n), nil
}

// parseLimit parses a limit: decimal digits only, 0 or more.
func parseLimit(s string) (int, error) {
	n, err := strconv.ParseUint(s, 10, 31)
	if err != nil {
		return 0, errors.New("want a decimal number, 0 or more")
	}
	return int(n), nil
}

func parseAddr(s string) (netip.Addr, error) {
	a, err := netip.ParseAddr(s)
	if err != nil {
		return a, errors.New("not an IP address")
	}
	if a.Zone() != "" {
		return a, errors.New("write the address without %" + a.Zone())
	}
	return a, nil
}

// parsePrefix parses an address or a prefix.
func parsePrefix(s string) (netip.Prefix, error) {
	if a, err := netip.ParseAddr(s); err == nil {
		return a.Prefix(a.BitLen())
	}
	p, err := netip.ParsePrefix(s)
	if err != nil {
		return p, errors.New("neither an IP address nor a prefix")
	}
	return p.Masked(), nil
}
