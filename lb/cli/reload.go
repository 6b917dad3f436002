package cli

import (
	"reflect"
	"time"

	"github.com/steelyard-lb/steelyard/config"
)

// reload reads the configuration again. One that is wrong, or that asks for what cannot be done, changes nothing.
func (a *agent) reload() {
	cfg, err := load(a.name)
	if err == nil {
		err = unsupported(cfg)
	}
	if err == nil {
		err = a.file.Use(cfg)
	}
	if err != nil {
		now := *a.loaded.Load()
		now.err = err.Error()
		a.loaded.Store(&now)
		a.log.Error("configuration refused; the running one stays in force", "config", a.name, "err", err)
		return
	}
	a.level.Set(cfg.Log.Level)
	for _, section := range needRestart(a.cfg, cfg) {
		a.log.Warn("changed section takes effect at the next start", "section", section)
	}
	a.loaded.Store(&loadState{at: time.Now(), warnings: cfg.Warnings})
	a.log.Info("configuration reloaded", "config", a.name, "services", len(cfg.Services))
}

// needRestart returns the sections that differ and are read at the start only.
func needRestart(running, next *config.Config) []string {
	var changed []string
	for _, s := range []struct {
		name string
		a, b any
	}{
		{"node", running.Node, next.Node}, {"datapath", running.Datapath, next.Datapath}, {"bgp", running.BGP, next.BGP},
		{"l2", running.L2, next.L2}, {"admin", running.Admin, next.Admin}, {"kubernetes", running.Kubernetes, next.Kubernetes},
		{"probe", running.Probe, next.Probe}, {"pool, for Services of the cluster", clusterPools(running), clusterPools(next)},
	} {
		if !reflect.DeepEqual(s.a, s.b) {
			changed = append(changed, s.name)
		}
	}
	return changed
}

// clusterPools are the pools as far as the source that is a cluster has read them.
func clusterPools(c *config.Config) []config.Pool {
	if c.Kubernetes == nil {
		return nil
	}
	return c.Pools
}
