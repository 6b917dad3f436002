package lb

import (
	"errors"
	"fmt"
	"net/netip"
	"strconv"
	"time"
)

// ErrTracing means that packets cannot be traced because another trace is running.
var ErrTracing = errors.New("another trace is running; end it first")

// TraceFilter selects packets of both directions. A zero field matches every packet.
type TraceFilter struct {
	Client  netip.Addr
	VIP     netip.Addr
	Service string
	Drops   bool // only packets that are dropped or refused
}

// Set sets the field called name from text. API query parameters and command line flags use these names.
func (f *TraceFilter) Set(name, value string) (err error) {
	switch name {
	case "client":
		f.Client, err = parseHost(value)
	case "vip":
		f.VIP, err = parseHost(value)
	case "service":
		f.Service = value
	case "drops":
		if f.Drops, err = strconv.ParseBool(value); err != nil {
			err = errors.New("want true or false")
		}
	default:
		return fmt.Errorf("unknown filter %q; allowed: client, vip, service, drops", name)
	}
	if err != nil {
		return fmt.Errorf("%s %q: %w", name, value, err)
	}
	return nil
}

// parseHost parses an address that packets can have.
func parseHost(s string) (netip.Addr, error) {
	a, err := parseAddr(s)
	if err == nil && a.IsUnspecified() {
		err = errors.New("not the address of a host")
	}
	return a, err
}

// TracedPacket is one packet and what the datapath did with it.
type TracedPacket struct {
	Time      time.Time `json:"time"`
	Interface string    `json:"interface"` // where it arrived, or where this node sends it (hooks tc-out, proxy-out)
	Hook      string    `json:"hook"`      // xdp, tc or tc-out; of the service proxy proxy or proxy-out
	// Action, Reason and Meaning are listed in docs/reasons.md.
	Action  string         `json:"action"`
	Reason  string         `json:"reason"`
	Meaning string         `json:"meaning"`
	Service string         `json:"service,omitempty"`
	Backend netip.AddrPort `json:"backend,omitzero"`
	Forward Method         `json:"forward,omitempty"`
	Reply   bool           `json:"reply,omitempty"` // from the backend to the client
	// Egress is the interface that sends it, or "" if the stack gets it or nobody.
	Egress string `json:"egress,omitempty"`
	// Before and After are the first bytes of the frame as it arrived and as it left. After is empty if it was dropped.
	// The next hop's MAC address is missing if the kernel has to resolve it.
	Before Frame `json:"before"`
	After  Frame `json:"after,omitzero"`
}

// Frame is the start of an Ethernet frame.
type Frame struct {
	Length int    `json:"length"` // of the whole frame; several segments may be one frame
	Bytes  []byte `json:"bytes"`
}

// TraceEvent is a packet, the number of packets that a trace has left out since the last event, or an error.
type TraceEvent struct {
	Packet    *TracedPacket `json:"packet,omitempty"`
	OverLimit uint64        `json:"over_limit,omitempty"` // packets beyond TraceLimit
	NotRead   uint64        `json:"not_read,omitempty"`   // packets that the reader was too slow for
	Error     string        `json:"error,omitempty"`      // why the trace has ended early; the last event
}

// TraceLimit is the maximum number of packets per second in a trace.
const TraceLimit = 20_000
