package lb

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"
)

// FlowStatus is one flow that the kernel knows. Flows of services whose servers answer clients themselves are known only after
// they have gone on, and by a sample of their packets.
type FlowStatus struct {
	Service  string         `json:"service,omitempty"` // "": gone
	Client   netip.AddrPort `json:"client"`
	Address  netip.Addr     `json:"address"`
	Port     uint16         `json:"port"`
	Protocol Protocol       `json:"protocol"`
	Backend  netip.AddrPort `json:"backend,omitzero"`
	Source   netip.AddrPort `json:"source,omitzero"` // of ours, by nat: whom the backend sees
	Forward  Method         `json:"forward"`
	State    FlowState      `json:"state"`
	Idle     float64        `json:"idle_seconds"` // since its last packet
}

// FlowState is where in its life a flow is.
type FlowState string

// The states of a flow.
const (
	FlowHalfOpen    FlowState = "half-open" // the client has not proved that it is there
	FlowEstablished FlowState = "established"
	FlowClosing     FlowState = "closing" // one side has said that it is done
	FlowClosed      FlowState = "closed"  // both have
)

// FlowStates are all of them.
var FlowStates = []FlowState{FlowHalfOpen, FlowEstablished, FlowClosing, FlowClosed}

// FlowFilter says which flows are wanted; what is zero is not looked at.
type FlowFilter struct {
	Service string
	Client  netip.Prefix
	Backend netip.Addr
	Address netip.Addr
	Port    uint16
	State   FlowState
	// Limit is how many flows are returned at most; 0: all.
	Limit int
}

// Match reports whether f is wanted.
func (w FlowFilter) Match(f FlowStatus) bool {
	return (w.Service == "" || w.Service == f.Service) &&
		(!w.Client.IsValid() || w.Client.Contains(f.Client.Addr())) &&
		(!w.Backend.IsValid() || w.Backend == f.Backend.Addr()) &&
		(!w.Address.IsValid() || w.Address == f.Address) &&
		(w.Port == 0 || w.Port == f.Port) &&
		(w.State == "" || w.State == f.State)
}

// Set sets one field by its name in text, as a query of the API and a flag of the command line have it.
func (w *FlowFilter) Set(name, value string) (err error) {
	switch name {
	case "service":
		w.Service = value
	case "client":
		w.Client, err = parsePrefix(value)
	case "backend":
		w.Backend, err = netip.ParseAddr(value)
	case "address":
		w.Address, err = netip.ParseAddr(value)
	case "port":
		_, err = fmt.Sscan(value, &w.Port)
	case "state":
		if w.State = FlowState(value); !slices.Contains(FlowStates, w.State) {
			err = fmt.Errorf("allowed: %s", Words(FlowStates))
		}
	case "limit":
		if _, err = fmt.Sscan(value, &w.Limit); err == nil && w.Limit < 0 {
			err = fmt.Errorf("want 0 or more")
		}
	default:
		return fmt.Errorf("unknown filter %q; allowed: %s", name, strings.Join(FlowFilters, ", "))
	}
	if err != nil {
		return fmt.Errorf("%s %q: %w", name, value, err)
	}
	return nil
}

// FlowFilters are the names that FlowFilter.Set knows.
var FlowFilters = []string{"service", "client", "backend", "address", "port", "state", "limit"}

// parsePrefix reads an address or a prefix.
func parsePrefix(s string) (netip.Prefix, error) {
	if a, err := netip.ParseAddr(s); err == nil {
		return a.Prefix(a.BitLen())
	}
	p, err := netip.ParsePrefix(s)
	return p.Masked(), err
}
