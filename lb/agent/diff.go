package agent

import (
	"cmp"
	"context"
	"fmt"
	"reflect"
	"slices"
	"time"

	"github.com/steelyard-lb/steelyard/config"
	"github.com/steelyard-lb/steelyard/lb"
	"github.com/steelyard-lb/steelyard/lb/admin"
	"github.com/steelyard-lb/steelyard/lb/file"
)

// diff returns what a reload would change, or, with a name, what text would change instead of the file.
func (l *reloader) diff(name string, text []byte) (then admin.Reloaded, err error) {
	l.readiness.exclusive(func() {
		if name == "" {
			name = l.file
			text, err = config.Read(l.file)
		}
		var cfg *config.Config
		if err == nil {
			cfg, err = reload(l.loaded, name, text)
		}
		var plan *file.Plan
		if err == nil {
			plan, err = l.plan(cfg)
		}
		if err == nil {
			then = admin.Reloaded{
				Config: name, Changes: l.changes(plan, cfg), Warnings: cfg.Warnings,
				NeedRestart: needRestart(l.running, cfg),
			}
			if err := l.guard(plan, cfg, ""); err != nil {
				then.Warnings = append(slices.Clip(then.Warnings), "a reload would refuse this: "+err.Error())
			}
		}
	})
	releaseMemory()
	return then, err
}

// countTime bounds the time to count the connections that a change ends.
const countTime = 2 * time.Second

// changes returns what a plan and the rest of its configuration change, with the number of connections that this ends.
func (l *reloader) changes(plan *file.Plan, cfg *config.Config) []lb.Change {
	all := append(sectionsChanged(l.loaded, cfg), plan.Changes...)
	if l.drains != nil && !l.goesBack(cfg.Text) {
		all = append(all, l.drains.ended(all)...)
	}
	if l.flows == nil {
		return all
	}
	ctx, cancel := context.WithTimeout(context.Background(), countTime)
	defer cancel()
	for i := range all {
		if all[i].Ends == (lb.FlowFilter{}) {
			continue
		}
		ends := all[i].Ends
		ends.State, ends.Limit = lb.FlowEstablished, lb.ConnectionsMax
		flows, _, err := l.flows(ctx, ends)
		if err != nil || ctx.Err() != nil {
			break // the rest are not counted
		}
		all[i].Connections = len(flows)
	}
	return all
}

// sectionsChanged returns the differences between two configurations, except in their services.
func sectionsChanged(was, is *config.Config) (all []lb.Change) {
	for _, s := range []struct {
		name string
		a, b any
	}{
		{"[node]", was.Node, is.Node}, {"[datapath]", was.Datapath, is.Datapath},
		{"[bgp]", withoutPeers(was.BGP), withoutPeers(is.BGP)}, {"[l2]", was.L2, is.L2},
		{"[kubernetes]", was.Kubernetes, is.Kubernetes}, {"[probe]", was.Probe, is.Probe},
		{"[admin]", was.Admin, is.Admin}, {"[log]", was.Log, is.Log},
	} {
		all = append(all, changeOf(s.name, s.a, s.b)...)
	}
	all = append(all, changesIn("peer", bgpPeers(was), bgpPeers(is), func(p config.Peer) string {
		if p.Address.IsValid() {
			return p.Address.String()
		}
		return cmp.Or(p.Interface, p.ListenRange.String())
	})...)
	return append(all, changesIn("pool", was.Pools, is.Pools, func(p config.Pool) string { return p.Name })...)
}

// changesIn returns the differences between two lists of objects.
func changesIn[T any](kind string, was, is []T, name func(T) string) (all []lb.Change) {
	find := func(list []T, want string) any {
		if i := slices.IndexFunc(list, func(x T) bool { return name(x) == want }); i >= 0 {
			return &list[i]
		}
		return (*T)(nil)
	}
	var names []string
	for _, x := range slices.Concat(was, is) {
		if n := name(x); !slices.Contains(names, n) {
			names = append(names, n)
		}
	}
	for _, n := range names {
		all = append(all, changeOf(fmt.Sprintf("%s %s", kind, n), find(was, n), find(is, n))...)
	}
	return all
}

// changeOf returns the change of an object; a nil pointer means that it does not exist.
func changeOf(object string, was, is any) []lb.Change {
	absent := func(x any) bool { v := reflect.ValueOf(x); return v.Kind() == reflect.Pointer && v.IsNil() }
	switch {
	case reflect.DeepEqual(was, is):
		return nil
	case absent(was):
		return []lb.Change{{Op: lb.Added, Object: object}}
	case absent(is):
		return []lb.Change{{Op: lb.Removed, Object: object}}
	}
	return []lb.Change{{Op: lb.Changed, Object: object}}
}

func bgpPeers(c *config.Config) []config.Peer {
	if c.BGP == nil {
		return nil
	}
	return c.BGP.Peers
}

func withoutPeers(b *config.BGP) *config.BGP {
	if b == nil {
		return nil
	}
	rest := *b
	rest.Peers = nil
	return &rest
}
