package datapath

import (
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"time"

	"github.com/steelyard-lb/steelyard/datapath/internal/flow"
	"github.com/steelyard-lb/steelyard/datapath/internal/hook"
	"github.com/steelyard-lb/steelyard/datapath/internal/pin"
	"github.com/steelyard-lb/steelyard/datapath/internal/table"
	"github.com/steelyard-lb/steelyard/lb"
)

// Schema is the version of the pinned state.
const Schema = pin.Schema

// Mode selects how programs are attached.
type Mode = hook.Mode

// The modes.
const (
	ModeAuto       = hook.ModeAuto
	ModeXDP        = hook.ModeXDP
	ModeXDPGeneric = hook.ModeXDPGeneric
	ModeTC         = hook.ModeTC
)

// InterfaceStatus describes how programs are attached to an interface.
type InterfaceStatus = hook.InterfaceStatus

// Default locations, for one agent per node.
const (
	DefaultPinPath  = pin.DefaultPath
	DefaultStateDir = "/run/steelyard"
)

// Timeouts says how long a flow in each state may be idle.
type Timeouts = flow.Timeouts

// DefaultTimeouts satisfies the RFCs that Timeouts names.
var DefaultTimeouts = Timeouts{
	HalfOpen: 30 * time.Second, Established: 130 * time.Minute, Closing: 4 * time.Minute, Closed: 10 * time.Second,
	UDP: 3 * time.Minute,
}

// TunnelKeys holds the keys of the tunnels between nodes.
type TunnelKeys = table.TunnelKeys

// Options holds the parameters of Open. Reach, Keep, TunnelSources, TunnelKeys and HashSeed may be empty, and bools may
// be false. All other fields are required.
type Options struct {
	Interfaces []string // uplinks: interfaces where packets of clients and servers arrive
	// FollowRoutes lets the set of interfaces change. Interfaces that no route uses are released after a while, and
	// interfaces towards clients behind routers are attached as well.
	FollowRoutes bool
	// Keep lists more interfaces that have the programs whenever they exist: those on which other hosts resolve VIPs.
	Keep []string
	// Reach lists more addresses, such as routers. The programs are also attached to the interfaces that lead to them.
	Reach []netip.Addr
	// Routers says that routers know the VIPs, so packets also arrive from clients that are not on this node's links.
	Routers   bool
	Mode      Mode
	MaxFlows  int         // established flows, 1 to 100,000,000; each has two entries of about 150 bytes
	SNATPorts []PortRange // source ports towards backends; they do not overlap
	// TunnelPort is the UDP destination port of GUE, on backends and on this node.
	TunnelPort uint16
	// HashSeed, the flow and the set of backends determine which backend receives a flow. It must be the same on all
	// balancers that share VIPs, and secret, so that nobody can craft flows that all select the same backend. Changing
	// it moves flows without an entry to other backends.
	HashSeed [32]byte
	// TunnelSources are the prefixes from which tunnel packets are accepted. If it is empty, none are accepted.
	TunnelSources []netip.Prefix
	// Own lists the addresses at which others reach this node's programs. No tunnel leads to them, even if only lo has
	// them, as with unnumbered BGP sessions.
	Own []netip.Addr
	// TunnelKeys holds the initial keys (see SetTunnelKeys). If it is nil, a previous agent's keys remain.
	TunnelKeys *TunnelKeys
	Timeouts   Timeouts
	PinPath    string // in a bpffs; only the default path is mounted if it is not
	StateDir   string // for files that must outlive the agent, until the next boot
	// Delivers prepares the datapath for pods on this node, and LocalBackends for backends with an address of this
	// machine.
	Delivers, LocalBackends bool
	// LocalClients balances connections that this machine opens to frontends with FrontendPlan.LocalClients.
	LocalClients bool
	// AllowUntestedKernel accepts a kernel before 6.1 that has all features that the programs need.
	AllowUntestedKernel bool
	// ForceClsact attaches tc programs as clsact filters, as on kernels before 6.6.
	ForceClsact bool
	// Boundary guards the computation of each frontend's table and the handling of kernel notifications. It may be nil.
	Boundary *lb.Boundary
	Log      *slog.Logger
	// fault lets a test fail a step of Open. It is called with the step's name after each step.
	fault func(step string) error
}

func (o Options) inject(step string) error {
	if o.fault == nil {
		return nil
	}
	return o.fault(step)
}

// servesSelf reports whether the stack delivers packets to backends.
func (o Options) servesSelf() bool { return o.Delivers || o.LocalBackends }

// PortRange includes both of its ports.
type PortRange struct{ First, Last uint16 }

// ports returns the first and last port of each range in SNATPorts.
func (o Options) ports() (ranges [][2]uint16) {
	for _, r := range o.SNATPorts {
		ranges = append(ranges, [2]uint16{r.First, r.Last})
	}
	return ranges
}

func (r PortRange) String() string { return fmt.Sprintf("%d-%d", r.First, r.Last) }

// maxPortRanges is SNAT_RANGES in bpf/config.h.
const maxPortRanges = 8

func (o Options) validate() error {
	for _, r := range o.SNATPorts {
		if r.First == 0 || r.First > r.Last {
			return fmt.Errorf("snat_ports %s is not a range", r)
		}
	}
	switch t := o.Timeouts; {
	case len(o.Interfaces) == 0:
		return errors.New("no interface to attach to")
	case o.MaxFlows < 1:
		return fmt.Errorf("max_flows is %d; want at least 1", o.MaxFlows)
	case len(o.SNATPorts) == 0 || len(o.SNATPorts) > maxPortRanges:
		return fmt.Errorf("snat_ports has %d ranges; want 1 to %d", len(o.SNATPorts), maxPortRanges)
	case o.TunnelPort == 0:
		return errors.New("tunnel_port is 0")
	case min(t.HalfOpen, t.Established, t.Closing, t.Closed, t.UDP) < time.Second:
		return fmt.Errorf("timeouts are %+v; want at least a second each", t)
	}
	return nil
}
