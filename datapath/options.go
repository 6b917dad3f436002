package datapath

import (
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"slices"
	"strings"
	"time"
)

// Mode is how programs are attached.
type Mode string

const (
	ModeAuto       Mode = "auto"        // native XDP where the driver has it, else tc; tc on veth and bridges
	ModeXDP        Mode = "xdp"         // native XDP, and tc behind it
	ModeXDPGeneric Mode = "xdp-generic" // XDP in the stack, for drivers without it; and tc behind it
	ModeTC         Mode = "tc"
)

var modes = []Mode{ModeAuto, ModeXDP, ModeXDPGeneric, ModeTC}

// UnmarshalText refuses anything but the four modes.
func (m *Mode) UnmarshalText(b []byte) error {
	if !slices.Contains(modes, Mode(b)) {
		names := make([]string, len(modes))
		for i, m := range modes {
			names[i] = string(m)
		}
		return fmt.Errorf("unknown mode %q; allowed: %s", b, strings.Join(names, ", "))
	}
	*m = Mode(b)
	return nil
}

// Where things are on a machine with one agent.
const (
	DefaultPinPath  = "/sys/fs/bpf/steelyard"
	DefaultStateDir = "/run/steelyard"
)

// Timeouts are the times after which a silent flow is over.
type Timeouts struct {
	HalfOpen    time.Duration // the client has not proved that it is there
	Established time.Duration // TCP and SCTP; RFC 5382, REQ-5: at least 2 h 4 min
	Closing     time.Duration // one side has said FIN; RFC 5382, REQ-5: 4 min
	Closed      time.Duration // both have, or one has said RST: for what was still on its way
	UDP         time.Duration // RFC 4787, REQ-5: at least 2 min
}

// DefaultTimeouts follow the RFCs.
var DefaultTimeouts = Timeouts{
	HalfOpen: 30 * time.Second, Established: 130 * time.Minute, Closing: 4 * time.Minute, Closed: 10 * time.Second, UDP: 3 * time.Minute,
}

// Options is everything Open needs. Delivers and ForceClsact may be false and TunnelSources empty; all others are required.
type Options struct {
	Interfaces []string // uplinks: where packets of clients and servers arrive
	Mode       Mode
	MaxFlows   int       // established flows, 1 to 100,000,000; each has two entries of about 150 bytes
	SNATPorts  [2]uint16 // first and last source port towards backends
	// TunnelPort is where tunnels of ours end, at backends and here.
	TunnelPort uint16
	// TunnelSources are whose tunnels may end here; none: nobody's.
	TunnelSources []netip.Prefix
	Timeouts      Timeouts
	PinPath       string // below a bpffs, which is mounted when it is the default one
	StateDir      string // what a restart must know and bpffs cannot keep
	// Delivers makes the datapath ready for backends on this machine.
	Delivers bool
	// ForceClsact attaches tc programs the way of kernels before 6.6.
	ForceClsact bool
	Log         *slog.Logger
	// fault makes a step of Open fail in a test: it is called after each, with its name.
	fault func(step string) error
}

func (o Options) inject(step string) error {
	if o.fault == nil {
		return nil
	}
	return o.fault(step)
}

func (o Options) validate() error {
	switch {
	case len(o.Interfaces) == 0:
		return errors.New("no interface to attach to")
	case o.MaxFlows < 1:
		return fmt.Errorf("max_flows is %d; want at least 1", o.MaxFlows)
	case o.SNATPorts[0] == 0 || o.SNATPorts[0] > o.SNATPorts[1]:
		return fmt.Errorf("snat_ports %d-%d is no range", o.SNATPorts[0], o.SNATPorts[1])
	case o.TunnelPort == 0 || o.TunnelPort >= o.SNATPorts[0] && o.TunnelPort <= o.SNATPorts[1]:
		return fmt.Errorf("tunnel_port is %d; want a port that is not one of snat_ports", o.TunnelPort)
	case min(o.Timeouts.HalfOpen, o.Timeouts.Established, o.Timeouts.Closing, o.Timeouts.Closed, o.Timeouts.UDP) < time.Second:
		return fmt.Errorf("timeouts are %+v; want at least a second each", o.Timeouts)
	}
	return nil
}
