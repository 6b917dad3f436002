package datapath

import (
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"slices"
	"strings"
	"time"

	"github.com/steelyard-lb/steelyard/datapath/internal/pin"
	"github.com/steelyard-lb/steelyard/lb"
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

// UnmarshalText accepts the four modes only.
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

// Default locations, for one agent per node.
const (
	DefaultPinPath  = pin.DefaultPath
	DefaultStateDir = "/run/steelyard"
)

// Timeouts are how long a flow may be idle, by state.
type Timeouts struct {
	HalfOpen    time.Duration // the client is not confirmed
	Established time.Duration // TCP and SCTP; RFC 5382, REQ-5: at least 2 h 4 min
	Closing     time.Duration // one side has sent FIN; RFC 5382, REQ-5: 4 min
	Closed      time.Duration // both have sent FIN, or one RST: for packets in flight
	UDP         time.Duration // RFC 4787, REQ-5: at least 2 min
}

// DefaultTimeouts follow the RFCs.
var DefaultTimeouts = Timeouts{
	HalfOpen: 30 * time.Second, Established: 130 * time.Minute, Closing: 4 * time.Minute, Closed: 10 * time.Second,
	UDP: 3 * time.Minute,
}

func (t Timeouts) shortest() time.Duration {
	return min(t.HalfOpen, t.Established, t.Closing, t.Closed, t.UDP)
}

// Options are the parameters of Open. Delivers, FollowRoutes, Routers and ForceClsact may be false, and Reach, Keep,
// TunnelSources, TunnelKeys and HashSeed empty; all others are required.
type Options struct {
	Interfaces []string // uplinks: interfaces on which packets of clients and servers arrive
	// FollowRoutes: Interfaces are only a start. One to which no route leads is released after a while, and those by
	// which clients behind routers are reached get the programs, too.
	FollowRoutes bool
	// Keep are interfaces that always have the programs, too, once they exist: those on which others resolve VIPs.
	Keep []string
	// Reach are addresses, such as those of routers: the interfaces by which they are reached get the programs, too.
	Reach []netip.Addr
	// Routers know the VIPs, so that packets arrive from clients that are not on the links of this node.
	Routers   bool
	Mode      Mode
	MaxFlows  int         // established flows, 1 to 100,000,000; each has two entries of about 150 bytes
	SNATPorts []PortRange // source ports towards backends; they do not overlap
	// TunnelPort is the UDP destination port of GUE, at backends and on this node.
	TunnelPort uint16
	// HashSeed determines which backend a flow gets, together with the flow and the backends. It is the same on all
	// balancers that share VIPs, and secret, so that nobody can choose flows that all get one backend. With another
	// seed, flows without an entry get another backend.
	HashSeed [32]byte
	// TunnelSources are the prefixes from which tunnel packets are accepted; empty: from none.
	TunnelSources []netip.Prefix
	// TunnelKeys are the first keys for SetTunnelKeys; nil: those of an earlier agent, or none.
	TunnelKeys *TunnelKeys
	Timeouts   Timeouts
	PinPath    string // in a bpffs, which is mounted for the default path only
	StateDir   string // files that must outlive the agent, until reboot
	// Delivers prepares the datapath for backends on this node.
	Delivers bool
	// ForceClsact attaches tc programs as clsact filters, as on kernels before 6.6.
	ForceClsact bool
	// Boundary is around the table of each frontend and around notifications of the kernel. It may be nil.
	Boundary *lb.Boundary
	Log      *slog.Logger
	// fault makes a step of Open fail in a test: it is called after each, with its name.
	fault func(step string) error
}

func (o Options) inject(step string) error {
	if o.fault == nil {
		return nil
	}
	return o.fault(step)
}

// PortRange is a range of ports.
type PortRange struct{ First, Last uint16 }

// ports returns the first and the last port of each of SNATPorts.
func (o Options) ports() (ranges [][2]uint16) {
	for _, r := range o.SNATPorts {
		ranges = append(ranges, [2]uint16{r.First, r.Last})
	}
	return ranges
}

func (r PortRange) String() string { return fmt.Sprintf("%d-%d", r.First, r.Last) }

// maxPortRanges is SNAT_RANGES of bpf/config.h.
const maxPortRanges = 8

func (o Options) validate() error {
	for _, r := range o.SNATPorts {
		if r.First == 0 || r.First > r.Last {
			return fmt.Errorf("snat_ports %s is not a range", r)
		}
	}
	switch {
	case len(o.Interfaces) == 0:
		return errors.New("no interface to attach to")
	case o.MaxFlows < 1:
		return fmt.Errorf("max_flows is %d; want at least 1", o.MaxFlows)
	case len(o.SNATPorts) == 0 || len(o.SNATPorts) > maxPortRanges:
		return fmt.Errorf("snat_ports has %d ranges; want 1 to %d", len(o.SNATPorts), maxPortRanges)
	case o.TunnelPort == 0:
		return errors.New("tunnel_port is 0")
	case o.Timeouts.shortest() < time.Second:
		return fmt.Errorf("timeouts are %+v; want at least a second each", o.Timeouts)
	}
	return nil
}
