package demo

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"maps"
	"net/netip"
	"os"
	"slices"
	"time"

	api "github.com/osrg/gobgp/v3/api"
	"github.com/osrg/gobgp/v3/pkg/log"
	"github.com/osrg/gobgp/v3/pkg/server"
	"github.com/vishvananda/netlink"
)

// routerConfigPath is the router's configuration file, in its host's /run.
const routerConfigPath = "/run/steelyard-demo/router.json"

// routerConfig is the router's configuration.
type routerConfig struct {
	ID        netip.Addr
	ASN       uint32
	Neighbors []neighbor
	Reject    []netip.Prefix // routes that it does not import
}

type neighbor struct {
	Address   netip.Addr
	ASN       uint32
	Interface string // the session depends on its carrier
}

// scanInterval is how often the router compares its kernel's routes with BGP's. A demo has few routes.
const scanInterval = 20 * time.Millisecond

var families = []*api.Family{
	{Afi: api.Family_AFI_IP, Safi: api.Family_SAFI_UNICAST},
	{Afi: api.Family_AFI_IP6, Safi: api.Family_SAFI_UNICAST},
}

// router speaks BGP and installs the routes that it learns into the kernel of its namespace.
type router struct {
	config    routerConfig
	bgp       *server.BgpServer
	log       *slog.Logger
	installed map[netip.Prefix][]netip.Addr
	carrier   map[string]bool
}

// Router is the demo's router, a separate process on the router's host: it reads its configuration from the host's /run
// and runs until ctx ends.
func Router(ctx context.Context, errOut io.Writer) error {
	text, err := os.ReadFile(routerConfigPath)
	if err != nil {
		return fmt.Errorf("this command is the router of `steelyard demo`, which starts it: %w", err)
	}
	handler := slog.NewTextHandler(errOut, &slog.HandlerOptions{Level: slog.LevelDebug})
	r := &router{
		log:       slog.New(handler).With("component", "router"),
		installed: map[netip.Prefix][]netip.Addr{}, carrier: map[string]bool{},
	}
	if err := json.Unmarshal(text, &r.config); err != nil {
		return fmt.Errorf("read %s: %w", routerConfigPath, err)
	}
	return r.run(ctx)
}

func (r *router) run(ctx context.Context) error {
	r.bgp = server.NewBgpServer(server.LoggerOption(&bgpLog{r.log}))
	go r.bgp.Serve() // runs until the process ends
	// It dials and does not listen, because after the loss of a session gobgp stays idle for 5 s and closes the
	// connections that it accepts during that time. A neighbour that also runs gobgp then stays idle for as long.
	err := r.bgp.StartBgp(ctx, &api.StartBgpRequest{Global: &api.Global{
		Asn: r.config.ASN, RouterId: r.config.ID.String(), ListenPort: -1, UseMultiplePaths: true,
	}})
	if err != nil {
		return fmt.Errorf("start bgp: %w", err)
	}
	for _, n := range r.config.Neighbors {
		r.carrier[n.Interface] = true
		if err := r.bgp.AddPeer(ctx, &api.AddPeerRequest{Peer: n.peer()}); err != nil {
			return fmt.Errorf("add neighbour %s: %w", n.Address, err)
		}
	}
	tick := time.NewTicker(scanInterval)
	defer tick.Stop()
	for {
		if err := errors.Join(r.watchLinks(ctx), r.install(ctx)); err != nil && ctx.Err() == nil {
			r.log.Warn("routes not updated", "err", err)
		}
		select {
		case <-ctx.Done():
			return r.bgp.StopBgp(context.WithoutCancel(ctx), &api.StopBgpRequest{})
		case <-tick.C:
		}
	}
}

func (n neighbor) peer() *api.Peer {
	p := &api.Peer{
		Conf: &api.PeerConf{NeighborAddress: n.Address.String(), PeerAsn: n.ASN},
		Timers: &api.Timers{Config: &api.TimersConfig{
			HoldTime: 3, KeepaliveInterval: 1, ConnectRetry: 1, IdleHoldTimeAfterReset: 1,
		}},
		GracefulRestart: &api.GracefulRestart{Enabled: true, HelperOnly: true},
	}
	for _, f := range families {
		if f.Afi == api.Family_AFI_IP && n.Address.Is6() {
			continue // no IPv4 route over an IPv6 session: its next hop would be an IPv6 address
		}
		p.AfiSafis = append(p.AfiSafis, &api.AfiSafi{
			Config:            &api.AfiSafiConfig{Family: f, Enabled: true},
			MpGracefulRestart: &api.MpGracefulRestart{Config: &api.MpGracefulRestartConfig{Enabled: true}},
		})
	}
	return p
}

// watchLinks ends the sessions over a link that has lost its carrier, without graceful restart, and allows them again
// when the carrier returns.
func (r *router) watchLinks(ctx context.Context) error {
	for _, name := range slices.Sorted(maps.Keys(r.carrier)) {
		link, err := netlink.LinkByName(name)
		if err != nil {
			return fmt.Errorf("interface %s: %w", name, err)
		}
		up := link.Attrs().OperState == netlink.OperUp
		if up == r.carrier[name] {
			continue
		}
		r.carrier[name] = up
		r.log.Info("link changed", "interface", name, "up", up)
		for _, n := range r.config.Neighbors {
			switch {
			case n.Interface != name:
			case up:
				err = errors.Join(err, r.bgp.EnablePeer(ctx, &api.EnablePeerRequest{Address: n.Address.String()}))
			default:
				request := &api.DisablePeerRequest{Address: n.Address.String(), Communication: "link down"}
				err = errors.Join(err, r.bgp.DisablePeer(ctx, request))
			}
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// install makes the kernel's routes match BGP's.
func (r *router) install(ctx context.Context) error {
	want := map[netip.Prefix][]netip.Addr{}
	for _, f := range families {
		request := &api.ListPathRequest{TableType: api.TableType_GLOBAL, Family: f}
		err := r.bgp.ListPath(ctx, request, func(d *api.Destination) {
			p, hops := r.hops(d)
			if len(hops) > 0 && !slices.Contains(r.config.Reject, p) {
				want[p] = hops
			}
		})
		if err != nil {
			return fmt.Errorf("list routes: %w", err)
		}
	}
	var errs []error
	for p, hops := range want {
		if slices.Equal(hops, r.installed[p]) {
			continue
		}
		if err := putRoute(p, hops); err != nil {
			errs = append(errs, err)
			continue
		}
		r.log.Info("route installed", "prefix", p, "via", hops)
		r.installed[p] = hops
	}
	for p := range r.installed {
		if want[p] != nil {
			continue
		}
		// The kernel removes the route itself when its last link goes down.
		route := &netlink.Route{Dst: netlink.NewIPNet(p.Addr().AsSlice()), Protocol: protocolBGP}
		if err := netlink.RouteDel(route); err != nil {
			r.log.Debug("route was already removed", "prefix", p, "err", err)
		}
		r.log.Info("route removed", "prefix", p)
		delete(r.installed, p)
	}
	return errors.Join(errs...)
}

// hops returns the next hops of all paths to a destination. The paths of the balancers differ in nothing else.
func (r *router) hops(d *api.Destination) (netip.Prefix, []netip.Addr) {
	p, err := netip.ParsePrefix(d.Prefix)
	if err != nil || !p.IsSingleIP() {
		return p, nil // the demo's balancers announce only host routes
	}
	var hops []netip.Addr
	for _, path := range d.Paths {
		if hop, ok := nextHop(path); ok {
			hops = append(hops, hop)
		}
	}
	slices.SortFunc(hops, netip.Addr.Compare)
	return p, slices.Compact(hops)
}

// nextHop finds the address in a path's attributes. For IPv6 it is in MP_REACH_NLRI (RFC 4760 §3).
func nextHop(path *api.Path) (netip.Addr, bool) {
	for _, any := range path.GetPattrs() {
		m, err := any.UnmarshalNew()
		if err != nil {
			continue
		}
		text := ""
		switch a := m.(type) {
		case *api.NextHopAttribute:
			text = a.NextHop
		case *api.MpReachNLRIAttribute:
			if len(a.NextHops) > 0 {
				text = a.NextHops[0]
			}
		}
		if hop, err := netip.ParseAddr(text); err == nil {
			return hop, true
		}
	}
	return netip.Addr{}, false
}

// protocolBGP marks routes in the kernel (RTPROT_BGP).
const protocolBGP = 186

func putRoute(p netip.Prefix, hops []netip.Addr) error {
	route := &netlink.Route{Dst: netlink.NewIPNet(p.Addr().AsSlice()), Protocol: protocolBGP}
	for _, h := range hops {
		route.MultiPath = append(route.MultiPath, &netlink.NexthopInfo{Gw: h.AsSlice()})
	}
	if len(hops) == 1 {
		route.MultiPath, route.Gw = nil, hops[0].AsSlice()
	}
	if err := netlink.RouteReplace(route); err != nil {
		return fmt.Errorf("route %s via %v: %w", p, hops, err)
	}
	return nil
}

// bgpLog passes on gobgp's log. Panic and Fatal do not end the router.
type bgpLog struct{ log *slog.Logger }

func (l *bgpLog) Panic(msg string, f log.Fields) { l.log.Error(msg, args(f)...) }
func (l *bgpLog) Fatal(msg string, f log.Fields) { l.log.Error(msg, args(f)...) }
func (l *bgpLog) Error(msg string, f log.Fields) { l.log.Error(msg, args(f)...) }
func (l *bgpLog) Warn(msg string, f log.Fields)  { l.log.Warn(msg, args(f)...) }
func (l *bgpLog) Info(msg string, f log.Fields)  { l.log.Info(msg, args(f)...) }
func (l *bgpLog) Debug(string, log.Fields)       {}
func (l *bgpLog) SetLevel(log.LogLevel)          {}
func (l *bgpLog) GetLevel() log.LogLevel         { return log.InfoLevel }

func args(f log.Fields) []any {
	var all []any
	for _, key := range slices.Sorted(maps.Keys(f)) {
		all = append(all, key, f[key])
	}
	return all
}
