package agent

import (
	"time"

	"github.com/steelyard-lb/steelyard/datapath"
	"github.com/steelyard-lb/steelyard/healthd"
	"github.com/steelyard-lb/steelyard/lb"
	"github.com/steelyard-lb/steelyard/lb/admin"
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

// describer returns the part of /v1/status that does not follow from the status of the engine.
type describer struct {
	node, version string
	started       time.Time
	reloader      *reloader
	datapath      interface {
		Interfaces() []datapath.InterfaceStatus
	}
}

func (d describer) info() admin.Info {
	l := d.reloader.state.Load()
	i := admin.Info{
		Node: d.node, Version: d.version, Started: d.started, Config: d.reloader.file,
		Loaded: l.at, LoadError: l.refused, Warnings: l.warnings,
	}
	for _, x := range d.datapath.Interfaces() {
		state := admin.Interface{Name: x.Name, Mode: string(x.Mode), Hook: x.Hook}
		if x.Mode == "" {
			state.Err = "interface not found; it is attached when it exists again"
		}
		i.Interfaces = append(i.Interfaces, state)
	}
	return i
}
