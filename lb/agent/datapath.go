package agent

import (
	"github.com/steelyard-lb/steelyard/datapath"
	"github.com/steelyard-lb/steelyard/healthd"
	"github.com/steelyard-lb/steelyard/lb"
)

func datapathOptions(o Options, facts node) (datapath.Options, error) {
	c := o.Config.Datapath
	var mode datapath.Mode
	if err := mode.UnmarshalText([]byte(c.Mode)); err != nil {
		return datapath.Options{}, err
	}
	return datapath.Options{
		Interfaces: facts.interfaces, Mode: mode, MaxFlows: c.MaxFlows, SNATPorts: c.SNATPorts,
		TunnelPort: c.TunnelPort, TunnelSources: c.TunnelSources, Timeouts: datapath.Timeouts(c.Timeouts),
		Delivers: o.Config.Kubernetes != nil,
		PinPath:  o.PinPath, StateDir: o.StateDir, Log: component(o.Log, "datapath"),
	}, nil
}

// checkPath returns how a probe of a server that has the VIP itself is sent: with a mark, from an address.
func checkPath(d *datapath.Datapath) func(lb.Check) (healthd.Way, error) {
	return func(c lb.Check) (healthd.Way, error) {
		mark, from, err := d.ProbeWay(c.VIP, c.Target.Addr(), c.Method, c.Encap)
		return healthd.Way{Mark: mark, From: from}, err
	}
}
