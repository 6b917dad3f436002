package agent

import (
	"context"
	"fmt"
	"log/slog"
	"maps"
	"net/netip"
	"slices"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/steelyard-lb/steelyard/announce"
	"github.com/steelyard-lb/steelyard/announce/bgp"
	"github.com/steelyard-lb/steelyard/announce/l2"
	"github.com/steelyard-lb/steelyard/config"
	"github.com/steelyard-lb/steelyard/lb"
)

// announcers are the configured announcers.
type announcers struct {
	all   lb.Announcer
	peers func() []lb.PeerStatus // BGP neighbours
	sent  func(peer netip.Addr) ([]lb.SentRoute, bool)
	// findings returns all faults except session faults.
	findings func() []lb.Finding
	// notReceived says why nobody receives an announced route, or returns "" if somebody does.
	notReceived func(lb.RouteStatus) string
	conflicts   conflicts
	askOwn      func(context.Context) // updates conflicts; nil if l2 is off
	l2Links     []string              // on which l2 announces
	kinds       []lb.AnnouncerKind    // enabled
	// grace is lb.EngineOptions.Grace.
	grace func(by []lb.AnnouncerKind) time.Duration
	// keepRoutes leaves the routes to graceful restart.
	keepRoutes func()
	// configure applies a changed [bgp]. It is nil if there was none at startup.
	configure func(*config.Config) error
	setLabels func(map[string]string) // of this node's Node
	members   *membership             // may be nil
	// require sets the function that reports which interfaces forward.
	require func(forwards func(name string) bool)
	tasks   []task
}

// configureTimeout bounds how long applying changed BGP options may take until every route is queued.
const configureTimeout = 30 * time.Second

func newAnnouncers(
	cfg *config.Config, facts node, keepDir string, registry *prometheus.Registry, b *lb.Boundary,
	log *slog.Logger,
) (announcers, error) {
	byKind := map[lb.AnnouncerKind]lb.Announcer{}
	out := announcers{
		peers: func() []lb.PeerStatus { return nil }, findings: func() []lb.Finding { return nil },
		sent:      func(netip.Addr) ([]lb.SentRoute, bool) { return nil, false },
		conflicts: conflicts{bgp: cfg.BGP != nil}, keepRoutes: func() {},
		grace: func([]lb.AnnouncerKind) time.Duration { return 0 }, setLabels: func(map[string]string) {},
		require: func(func(string) bool) {},
	}
	if cfg.BGP != nil {
		peers := newSelection(cfg, keepDir, component(log, "bgp"))
		options := func(c *config.Config) bgp.Options {
			o := bgpOptions(c, facts, component(log, "bgp"))
			o.Boundary = b
			return o
		}
		speaker, err := bgp.New(options(peers.chosen(cfg)))
		if err != nil {
			return announcers{}, fmt.Errorf("bgp: %w", err)
		}
		registry.MustRegister(speaker)
		byKind[lb.AnnounceBGP], out.peers, out.findings = speaker, speaker.Peers, speaker.Findings
		out.sent = speaker.Sent
		out.grace = func(by []lb.AnnouncerKind) time.Duration {
			if len(by) > 0 && !slices.Contains(by, lb.AnnounceBGP) {
				return 0
			}
			return speaker.Grace()
		}
		peers.apply = func(c *config.Config) error {
			ctx, cancel := context.WithTimeout(context.Background(), configureTimeout)
			defer cancel()
			return speaker.Configure(ctx, options(c))
		}
		out.configure, out.setLabels = peers.configure, peers.setLabels
		out.keepRoutes = speaker.Keep
		out.tasks = append(out.tasks, task{"bgp", speaker.Run})
	}
	if cfg.L2 != nil {
		options := l2.Options{
			Interfaces: facts.l2Interfaces, ProbeOwn: cfg.L2.ProbeOwn, Boundary: b, Log: component(log, "l2"),
		}
		var err error
		if out.members, err = newMembership(cfg, facts, b, log); err != nil {
			return announcers{}, err
		}
		if out.members != nil {
			options.Members = out.members
			out.tasks = append(out.tasks, task{"members of [l2]", out.members.Run})
		}
		responder, err := l2.New(options)
		if err != nil {
			return announcers{}, fmt.Errorf("l2: %w", err)
		}
		registry.MustRegister(responder)
		byKind[lb.AnnounceL2], out.conflicts.list = responder, responder.Conflicts
		out.conflicts.waiting, out.conflicts.since = responder.Waiting, responder.Since
		out.require, out.askOwn, out.l2Links = responder.Require, responder.AskOwn, facts.l2Interfaces
		others := out.findings
		out.findings = func() []lb.Finding { return append(others(), responder.Findings()...) }
		out.tasks = append(out.tasks, task{"l2", responder.Run})
	}
	out.all = announce.NewMux(byKind)
	out.kinds = slices.Sorted(maps.Keys(byKind))
	out.notReceived = func(r lb.RouteStatus) string { return notReceived(r, byKind) }
	return out, nil
}

// seen returns a status of the engine with its routes as their receivers see them.
func (a announcers) seen(s lb.Status) lb.Status {
	a.conflicts.mark(&s)
	s.MarkOffered(a.notReceived)
	for i, r := range s.Routes {
		if r.State != lb.RouteWithheld {
			s.Routes[i].By = intersection(a.kinds, r.By)
		}
	}
	return s
}

// intersection returns the enabled announcers among those allowed for a route; if allowed is empty, all of them.
func intersection(on, allowed []lb.AnnouncerKind) []lb.AnnouncerKind {
	if len(allowed) == 0 {
		return on
	}
	return slices.DeleteFunc(slices.Clone(on), func(k lb.AnnouncerKind) bool { return !slices.Contains(allowed, k) })
}

// judge returns routes as their receivers see them.
func (a announcers) judge(routes []lb.RouteStatus) []lb.RouteStatus {
	return a.seen(lb.Status{Routes: routes}).Routes
}

// carrier is an announcer whose announcements may reach nobody.
type carrier interface {
	// Carried reports whether a VIP's route is sent to a neighbour.
	Carried(vip netip.Addr) bool
}

// accepter is a carrier that knows which of its neighbours reject a route.
type accepter interface {
	// NotAccepted returns which neighbour does not accept the route, and why, or "" if none is known.
	NotAccepted(vip netip.Addr) string
}

// notReceived says why nobody receives a route, given the enabled announcers, or returns "".
func notReceived(r lb.RouteStatus, on map[lb.AnnouncerKind]lb.Announcer) string {
	reason := "none of its announcers is enabled"
	for kind, a := range on {
		if len(r.By) > 0 && !slices.Contains(r.By, kind) {
			continue
		}
		c, ok := a.(carrier)
		if !ok || c.Carried(r.Address) {
			return ""
		}
		reason = "no BGP peer has it: no session that carries it is established"
		if x, ok := a.(accepter); ok {
			if text := x.NotAccepted(r.Address); text != "" {
				reason = "no BGP peer has it: " + text
			}
		}
	}
	return reason
}

func bgpOptions(cfg *config.Config, facts node, log *slog.Logger) bgp.Options {
	c := cfg.BGP
	o := bgp.Options{
		ASN: c.ASN, RouterID: facts.routerID, ListenPort: c.ListenPort, LocalPref: c.LocalPref,
		AggregateV4: c.AggregateV4, AggregateV6: c.AggregateV6, Weighted: c.Weighted,
		RestartTime: c.RestartTime, GracefulShutdown: c.GracefulShutdown, MaxRoutes: c.MaxRoutes,
		LongLivedRestartTime: c.LongLivedRestartTime,
		NextHopV4:            facts.address4, NextHopV6: facts.address6, Log: log,
	}
	o.Communities, o.LargeCommunities, o.ExtCommunities = communities(c.Communities)
	for _, p := range cfg.Pools {
		chosen := func(peer config.Peer) bool { return slices.Contains(peer.Pools, p.Name) }
		a := attributes(p.Attributes)
		if a.Empty() && p.AggregateV4+p.AggregateV6+p.Prepend == 0 && !slices.ContainsFunc(c.Peers, chosen) {
			continue // has no BGP settings, so its changes must affect no session
		}
		o.Pools = append(o.Pools, bgp.Pool{
			Name: p.Name, Ranges: p.Ranges, Attributes: a, Prepend: p.Prepend,
			AggregateV4: p.AggregateV4, AggregateV6: p.AggregateV6,
		})
	}
	for _, p := range c.Peers {
		o.Peers = append(o.Peers, bgp.Peer{
			Address: p.Address, Interface: p.Interface, ListenRange: p.ListenRange, ASN: p.ASN,
			External: p.External, LocalASN: p.LocalASN, Port: p.Port, Passive: p.Passive, Retry: p.ConnectRetry,
			Keepalive: p.Keepalive,
			Password:  p.Password.Reveal(), HoldTime: p.HoldTime,
			MaxReceived: p.MaxReceived, Multihop: p.Multihop, TTLSecurity: p.TTLSecurity, Source: p.Source,
			Device:          p.Device,
			GracefulRestart: p.GracefulRestart && c.RestartTime > 0, BFD: bgp.BFD{
				Interval: p.BFD.Interval, Multiplier: uint8(p.BFD.Multiplier), Multihop: p.BFD.Multihop,
				MinTTL: uint8(p.BFD.MinTTL),
			},
			Pools: p.Pools, Attributes: attributes(p.Attributes), Prepend: p.Prepend,
		})
	}
	return o
}

func attributes(a config.Attributes) bgp.Attributes {
	out := bgp.Attributes{LocalPref: a.LocalPref, MED: a.MED}
	out.Communities, out.LargeCommunities, out.ExtCommunities = communities(a.Communities)
	return out
}

// communities returns the standard, large and extended communities.
func communities(list []config.Community) (standard []uint32, large [][3]uint32, extended [][8]byte) {
	for _, x := range list {
		if s, ok := x.Standard(); ok {
			standard = append(standard, s)
		} else if l, ok := x.Large(); ok {
			large = append(large, l)
		} else if e, ok := x.Extended(); ok {
			extended = append(extended, e)
		}
	}
	return standard, large, extended
}
