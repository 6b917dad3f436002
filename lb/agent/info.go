package agent

import (
	"slices"
	"time"

	"github.com/steelyard-lb/steelyard/datapath"
	"github.com/steelyard-lb/steelyard/lb"
	"github.com/steelyard-lb/steelyard/lb/admin"
)

// describer returns the part of /v1/status that the engine's status does not contain.
type describer struct {
	node, version string
	started       time.Time
	reloader      *reloader
	findings      []func() []lb.Finding
	drained       func() lb.Drains
	cluster       func() *admin.Cluster // nil without a cluster
	l2            bool
	datapath      interface {
		Interfaces() []datapath.InterfaceStatus
	}
}

func (d describer) info() admin.Info {
	l := d.reloader.state.Load()
	i := admin.Info{
		Node: d.node, Version: d.version, Started: d.started, Config: d.reloader.file,
		Loaded: l.at, LoadError: l.refused,
		NeedRestart: l.restart, L2: d.l2,
	}
	if l.trial != nil {
		i.ConfirmUntil = l.trial.until
	}
	for _, findings := range d.findings {
		i.Findings = append(i.Findings, findings()...)
	}
	i.Findings = slices.Concat(i.Findings, d.reloader.findings(), lb.FoundConfiguration.Each(l.warnings))
	if d.drained != nil {
		now := d.drained()
		i.Weights, now.Weights = now.Weights, nil
		if now.Node || len(now.Names()) > 0 {
			i.Drained = &now
		}
	}
	if d.cluster != nil {
		i.Cluster = d.cluster()
	}
	for _, x := range d.datapath.Interfaces() {
		state := admin.Interface{Name: x.Name, Mode: string(x.Mode), Hook: x.Hook, Err: x.Fault, Down: x.Down}
		if x.Mode == "" && x.Fault == "" {
			state.Err = "interface not found; it will be attached when it reappears"
		}
		i.Interfaces = append(i.Interfaces, state)
	}
	return i
}
