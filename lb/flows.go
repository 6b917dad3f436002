package lb

import (
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strconv"
	"strings"
)

// FlowStatus is one flow in the kernel's flow table. After the first packet, only a sample of a direct-return flow's
// packets (dsr, tunnel) is recorded, so such a flow appears late and Idle is approximate.
type FlowStatus struct {
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
}

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
	return (w.Service == "" || w.Service == f.Service) &&
		(!w.Client.IsValid() || w.Client.Contains(f.Client.Addr())) &&
		(!w.Backend.IsValid() || w.Backend == f.Backend.Addr()) &&
		(!w.Address.IsValid() || w.Address == f.Address) &&
		(w.Port == 0 || w.Port == f.Port) &&
		(w.State == "" || w.State == f.State)
}

// Set sets the field called name from text. API query parameters and command line flags use these names.
func (w *FlowFilter) Set(name, value string) (err error) {
	switch name {
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
var FlowFilters = []string{"service", "client", "backend", "address", "port", "state", "limit"}

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
