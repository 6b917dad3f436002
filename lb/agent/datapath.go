package agent

import (
	"cmp"
	"context"
	"io"
	"net/netip"
	"slices"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/steelyard-lb/steelyard/config"
	"github.com/steelyard-lb/steelyard/datapath"
	"github.com/steelyard-lb/steelyard/healthd"
	"github.com/steelyard-lb/steelyard/lb"
)

// forwarder is the part of datapath.Datapath that the agent needs.
type forwarder interface {
	lb.Datapath
	prometheus.Collector
	io.Closer
	Run(context.Context) error
	Interfaces() []datapath.InterfaceStatus
	Findings() []lb.Finding
	Traffic() (map[lb.Frontend]datapath.Traffic, map[netip.AddrPort]datapath.Traffic, error)
	Handshakes() (map[netip.AddrPort]lb.Handshakes, error)
	Flows(context.Context, lb.FlowFilter) (flows []lb.FlowStatus, more bool, err error)
	EndFlows(context.Context, lb.FlowFilter) (ended, kept int, err error)
	Explain(lb.Question) (lb.Explanation, error)
	Trace(context.Context, lb.TraceFilter, datapath.TracePart, func([]lb.TraceEvent) error) error
	SetTunnelSources([]netip.Addr) error
	SetTunnelKeys(datapath.TunnelKeys) error
	OnFault(func(changed map[netip.Addr]string))
	ProbeWay(vip, server netip.Addr, method lb.Method, encap lb.Encap) (mark uint32, from netip.Addr, err error)
}

// openDatapath loads and attaches the kernel programs.
func openDatapath(o datapath.Options) (forwarder, error) { return datapath.Open(o) }

// forwards reports whether packets that arrive on an interface are forwarded.
func forwards(all []datapath.InterfaceStatus, name string) bool {
	return slices.ContainsFunc(all, func(s datapath.InterfaceStatus) bool { return s.Name == name && s.Mode != "" })
}

func datapathOptions(o Options, facts node) datapath.Options {
	c := o.Config.Datapath
	return datapath.Options{
		Reach: peersOf(o.Config), Routers: o.Config.BGP != nil && len(o.Config.BGP.Peers) > 0,
		FollowRoutes: len(c.Interfaces) == 0, Keep: linksOf(o.Config, facts), Interfaces: facts.interfaces,
		Mode: datapath.Mode(c.Mode), MaxFlows: c.MaxFlows, SNATPorts: toPortRanges(c.SNATPorts),
		TunnelPort: c.TunnelPort, TunnelSources: c.TunnelSources, Own: facts.addresses(),
		Timeouts: datapath.Timeouts(c.Timeouts),
		Delivers: o.Config.Kubernetes != nil, LocalBackends: servesItself(o.Config, true), LocalClients: c.LocalClients,
		TunnelKeys: fileKeys(o.Config), HashSeed: fileSeed(o.Config),
		PinPath: o.PinPath, StateDir: o.StateDir, Log: component(o.Log, "datapath"),
		Boundary: o.boundary, AllowUntestedKernel: c.AllowUntestedKernel,
	}
}

// peersOf returns the addresses of the BGP peers. Clients' packets arrive on the interfaces that lead to them.
func peersOf(c *config.Config) (addrs []netip.Addr) {
	if c.BGP == nil {
		return nil
	}
	for _, p := range c.BGP.Peers {
		if p.Address.IsValid() {
			addrs = append(addrs, p.Address.WithZone(""))
		}
	}
	return addrs
}

// linksOf returns the interfaces on which clients' packets arrive: where hosts resolve VIPs, and where peers have
// link-local addresses.
func linksOf(c *config.Config, facts node) (names []string) {
	if c.L2 != nil {
		names = slices.Clone(facts.l2Interfaces)
	}
	if c.BGP == nil {
		return names
	}
	for _, p := range c.BGP.Peers {
		if zone := cmp.Or(p.Interface, p.Address.Zone()); zone != "" && !slices.Contains(names, zone) {
			names = append(names, zone)
		}
	}
	return names
}

// checkPath returns a function that returns the mark and the source address for a check's probes.
func checkPath(d forwarder) func(lb.Check) (healthd.Way, error) {
	return func(c lb.Check) (healthd.Way, error) {
		mark, from, err := d.ProbeWay(c.VIP, c.Target.Addr(), c.Method, c.Encap)
		return healthd.Way{Mark: mark, From: from}, err
	}
}

func toPortRanges(from []config.PortRange) (to []datapath.PortRange) {
	for _, r := range from {
		to = append(to, datapath.PortRange(r))
	}
	return to
}
