package lab

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"os/exec"
	"slices"
	"time"
)

// RouterKind is a routing daemon.
type RouterKind string

const (
	BIRD RouterKind = "bird" // BIRD 2, apt package bird2
	FRR  RouterKind = "frr"  // FRRouting 8 or later, apt package frr
)

// RouterKinds are the routing daemons there are.
var RouterKinds = []RouterKind{BIRD, FRR}

// Installed returns an error that names the package to install when the daemon is not on this machine.
func (k RouterKind) Installed() error {
	programs := map[RouterKind][]string{BIRD: {"bird", "birdc"}, FRR: {"zebra", "bgpd", "vtysh"}}
	packages := map[RouterKind]string{BIRD: "bird2", FRR: "frr"}
	for _, name := range programs[k] {
		if _, err := program(name, packages[k]); err != nil {
			return err
		}
	}
	return nil
}

// RouterConfig is what a Router is told. It takes every route its neighbours announce, of both families, over every
// session; shares traffic among up to 16 equal ones; tells the neighbours nothing; and keeps the routes of a neighbour
// that restarts gracefully (RFC 4724, as helper).
type RouterConfig struct {
	// ID is the BGP identifier, an IPv4 address.
	ID        netip.Addr
	ASN       uint32
	Neighbors []Neighbor
	// HoldTime is offered to every neighbour, at least 3 s and in whole seconds; 0 means 9 s. Keepalives are a third.
	HoldTime time.Duration
}

// Neighbor is a BGP neighbour of a Router. Sessions over IPv4 carry both families, those over IPv6 carry IPv6.
type Neighbor struct {
	Address netip.Addr
	ASN     uint32
	// Password is the key of TCP MD5 signatures (RFC 2385); empty: none.
	Password string
	// Passive: the router waits for the neighbour to connect.
	Passive bool
}

// PeerState is what a router says of a neighbour.
type PeerState struct {
	Established bool
	// Info is what the daemon says, in its own words: "Established", "Active        Socket: Connection refused".
	Info string
}

// Router is a host that runs a routing daemon.
type Router struct {
	*Host
	Kind RouterKind
	// Processes are the programs of the daemon.
	Processes []*Process
	config    RouterConfig
	daemon    daemon
}

// daemon is what differs between routing daemons.
type daemon interface {
	// start starts the programs, and returns when they answer.
	start(ctx context.Context, h *Host, c RouterConfig) ([]*Process, error)
	// show runs a command of the daemon's own shell.
	show(ctx context.Context, h *Host, command string) (string, error)
	peers(ctx context.Context, h *Host, c RouterConfig) (map[netip.Addr]PeerState, error)
	// reset drops the session with a neighbour by a NOTIFICATION, and lets it come up again.
	reset(ctx context.Context, h *Host, c RouterConfig, neighbor netip.Addr) error
}

// StartRouter makes h forward and starts a routing daemon in it. It returns when the daemon answers its control
// socket; sessions come up later. ctx bounds the start only.
func StartRouter(ctx context.Context, h *Host, kind RouterKind, c RouterConfig) (*Router, error) {
	if c.HoldTime == 0 {
		c.HoldTime = 9 * time.Second
	}
	daemons := map[RouterKind]daemon{BIRD: &bird{}, FRR: &frr{}}
	r := &Router{Host: h, Kind: kind, config: c, daemon: daemons[kind]}
	if r.daemon == nil {
		return nil, fmt.Errorf("unknown router %q; there are %v", kind, RouterKinds)
	}
	if err := h.Forward(); err != nil {
		return nil, err
	}
	var err error
	if r.Processes, err = r.daemon.start(ctx, h, c); err != nil {
		return nil, fmt.Errorf("start %s in host %s: %w", kind, h, err)
	}
	return r, nil
}

// Show runs a command in the daemon's own shell (birdc or vtysh) and returns what it says.
func (r *Router) Show(ctx context.Context, command string) (string, error) {
	return r.daemon.show(ctx, r.Host, command)
}

// Peers returns the state of every neighbour.
func (r *Router) Peers(ctx context.Context) (map[netip.Addr]PeerState, error) {
	return r.daemon.peers(ctx, r.Host, r.config)
}

// Reset ends the session with a neighbour by an administrative reset and lets it come up again.
func (r *Router) Reset(ctx context.Context, neighbor netip.Addr) error {
	return r.daemon.reset(ctx, r.Host, r.config, neighbor)
}

// WaitEstablished waits until the sessions with all these neighbours are up; with none named, all there are.
func (r *Router) WaitEstablished(ctx context.Context, within time.Duration, neighbors ...netip.Addr) error {
	if len(neighbors) == 0 {
		for _, n := range r.config.Neighbors {
			neighbors = append(neighbors, n.Address)
		}
	}
	_, err := Until(ctx, within, fmt.Sprintf("%s has sessions with %v", r.Host, neighbors), func() error {
		peers, err := r.Peers(ctx)
		if err != nil {
			return err
		}
		for _, n := range neighbors {
			if !peers[n].Established {
				err = errors.Join(err, fmt.Errorf("%s: %s", n, peers[n].Info))
			}
		}
		return err
	})
	return err
}

// WaitNextHops waits until the kernel of the host sends traffic for dst to exactly these next hops (none: there is no
// route), and returns how long that took.
func (h *Host) WaitNextHops(ctx context.Context, within time.Duration, dst netip.Prefix, want ...netip.Addr) (time.Duration, error) {
	want = slices.Clone(want)
	slices.SortFunc(want, netip.Addr.Compare)
	return Until(ctx, within, fmt.Sprintf("%s routes %s via %v", h, dst, want), func() error {
		got, err := h.NextHops(dst)
		if err == nil && !slices.Equal(got, want) {
			err = fmt.Errorf("it routes it via %v", got)
		}
		return err
	})
}

// program finds the executable of a routing daemon, also where Debian keeps what is not for people to run.
func program(name, pkg string) (string, error) {
	if path, err := exec.LookPath(name); err == nil {
		return path, nil
	}
	for _, dir := range []string{"/usr/lib/frr", "/usr/sbin", "/usr/local/sbin"} {
		if st, err := os.Stat(dir + "/" + name); err == nil && st.Mode()&0o111 != 0 {
			return dir + "/" + name, nil
		}
	}
	return "", fmt.Errorf("%s is not installed; try: apt-get install %s", name, pkg)
}

// dead returns an error when one of the processes has ended.
func dead(all []*Process) error {
	for _, p := range all {
		if !p.Running() {
			return Hopeless(fmt.Errorf("%s ended: %v\n%s", p.cmd.Path, p.err, p.Log.Tail(20)))
		}
	}
	return nil
}
