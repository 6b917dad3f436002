package peers

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"os/exec"
	"time"

	"github.com/steelyard-lb/steelyard/e2e/lab"
)

// RouterKind is a routing daemon.
type RouterKind string

const (
	BIRD RouterKind = "bird" // BIRD 2, apt package bird2
	FRR  RouterKind = "frr"  // FRRouting 8 or later, apt package frr
)

// RouterKinds are the supported routing daemons.
var RouterKinds = []RouterKind{BIRD, FRR}

// Installed returns an error with the name of the package to install if the daemon is missing.
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

// RouterConfig is a Router's configuration. The router imports all routes from its neighbours, in both families, over
// every session. It installs up to 16 equal paths (ECMP), exports routes to neighbours with Transit, and keeps the
// routes of a neighbour that restarts gracefully (RFC 4724, as helper).
type RouterConfig struct {
	// ID is the BGP identifier, an IPv4 address.
	ID        netip.Addr
	ASN       uint32
	Neighbors []Neighbor
	// HoldTime is proposed to every neighbour, at least 3 s and in whole seconds; 0 means 9 s. The keepalive interval
	// is a third of it.
	HoldTime time.Duration
}

// Neighbor is a BGP neighbour of a Router. Sessions over IPv4 carry both families; sessions over IPv6 carry only IPv6.
type Neighbor struct {
	Address netip.Addr
	// Interface is the link of an unnumbered neighbour without an Address, only for FRR.
	Interface string
	ASN       uint32
	// Password is the TCP MD5 key (RFC 2385), or "".
	Password string
	// Passive means that the router does not open the TCP connection.
	Passive bool
	// BFD makes the session end with its BFD session, which has an interval of 100 ms and the multiplier BFDMultiplier
	// (RFC 5882); 0 means 3. FRR uses the first neighbour's multiplier for all.
	BFD           bool
	BFDMultiplier int
	// Transit means that the neighbour is a router: it receives other neighbours' routes, and routes with the community
	// graceful-shutdown have the lowest preference (RFC 8326). FRR does both for every neighbour in another AS.
	Transit bool
}

// PeerState is a session's state, as the router reports it.
type PeerState struct {
	Established bool
	// Info is the daemon's text, such as "Established" or "Active        Socket: Connection refused".
	Info string
}

// Router is a host that runs a routing daemon.
type Router struct {
	*lab.Host
	Kind RouterKind
	// Processes are the daemon's programs.
	Processes []*lab.Process
	config    RouterConfig
	daemon    daemon
}

// daemon is the part that differs between routing daemons.
type daemon interface {
	// start starts the programs and returns once they respond on their control sockets.
	start(ctx context.Context, h *lab.Host, c RouterConfig) ([]*lab.Process, error)
	// show runs a command of the daemon's shell.
	show(ctx context.Context, h *lab.Host, command string) (string, error)
	peers(ctx context.Context, h *lab.Host, c RouterConfig) (map[netip.Addr]PeerState, error)
	// reset ends a neighbour's session with a NOTIFICATION (administrative reset). It is then established again.
	reset(ctx context.Context, h *lab.Host, c RouterConfig, neighbor netip.Addr) error
}

// StartRouter enables forwarding on h and starts a routing daemon there. It returns once the daemon responds on its
// control socket; sessions are established later. ctx applies only to the start.
func StartRouter(ctx context.Context, h *lab.Host, kind RouterKind, c RouterConfig) (*Router, error) {
	if c.HoldTime == 0 {
		c.HoldTime = 9 * time.Second
	}
	daemons := map[RouterKind]daemon{BIRD: &bird{}, FRR: &frr{}}
	r := &Router{Host: h, Kind: kind, config: c, daemon: daemons[kind]}
	if r.daemon == nil {
		return nil, fmt.Errorf("unknown router %q; allowed: %v", kind, RouterKinds)
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

// Show runs a command of the daemon's shell (birdc or vtysh) and returns its output.
func (r *Router) Show(ctx context.Context, command string) (string, error) {
	return r.daemon.show(ctx, r.Host, command)
}

// Peers returns the state of every neighbour.
func (r *Router) Peers(ctx context.Context) (map[netip.Addr]PeerState, error) {
	return r.daemon.peers(ctx, r.Host, r.config)
}

// Reset ends a neighbour's session with an administrative reset. It is then established again.
func (r *Router) Reset(ctx context.Context, neighbor netip.Addr) error {
	return r.daemon.reset(ctx, r.Host, r.config, neighbor)
}

// WaitEstablished waits until the sessions with these neighbours are established, or with all neighbours if none are
// given.
func (r *Router) WaitEstablished(ctx context.Context, within time.Duration, neighbors ...netip.Addr) error {
	if len(neighbors) == 0 {
		for _, n := range r.config.Neighbors {
			neighbors = append(neighbors, n.Address)
		}
	}
	_, err := lab.Until(ctx, within, fmt.Sprintf("%s has sessions with %v", r.Host, neighbors), func() error {
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

// program finds a routing daemon's executable in PATH or in Debian's directories for daemons.
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

// ended returns an error if one of the processes has ended.
func ended(all []*lab.Process) error {
	for _, p := range all {
		if err := p.Ended(); err != nil {
			return err
		}
	}
	return nil
}
