package agent

import (
	"context"
	"crypto/sha256"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strings"
	"time"

	"github.com/steelyard-lb/steelyard/config"
	"github.com/steelyard-lb/steelyard/lb"
	"github.com/steelyard-lb/steelyard/lb/admin"
	"github.com/steelyard-lb/steelyard/lb/file"
)

// guardedFrom is the number of services that must lose something before a configuration is refused.
const guardedFrom = 3

// losses are what a configuration takes from a cluster's Services.
type losses struct {
	lost  map[string]bool // Services that would lose an address
	total int             // Services with an address in a pool
	// How many of these have been used recently. If none has, all count.
	lostUsed, used int
}

// usedFor is how long a Service counts as used after the last packet of a client.
const usedFor = 10 * time.Minute

// lossesOf returns what a change of the pools takes from the cluster's Services: addresses that are in a pool of from
// and in none of to. Without pools, all addresses are served.
func lossesOf(services []lb.ServiceStatus, from, to *config.Config) losses {
	l, held, used := losses{lost: map[string]bool{}}, map[string]bool{}, map[string]bool{}
	for _, s := range services {
		if !strings.Contains(s.Service, "/") || !inPools(from, s.Address) { // from the file, or in no pool
			continue
		}
		held[s.Service] = true
		if time.Since(s.Last) < usedFor {
			used[s.Service] = true
		}
		if len(to.Pools) > 0 && !inPools(to, s.Address) {
			l.lost[s.Service] = true
		}
	}
	if len(used) == 0 {
		used = held
	}
	for name := range l.lost {
		if used[name] {
			l.lostUsed++
		}
	}
	l.total, l.used = len(held), len(used)
	return l
}

// guard returns an error for a configuration that takes addresses from more than a tenth of the services, or removes
// more than half of the file's services, or any if the file seems to be cut off. It returns nil if force, or the file's
// own force, is the word in the error. The word is derived from the names of these services, so it permits no other
// change, and is the same on each node. before is the text of the active file.
func guard(plan *file.Plan, cfg *config.Config, before string, cluster losses, force string) error {
	gone, lost := losers(plan.Changes)
	n := len(lost) + cluster.lostUsed
	maps.Copy(lost, cluster.lost)
	var problems []string
	if n >= guardedFrom && 10*n > plan.Before+cluster.used {
		problems = append(problems, fmt.Sprintf("%d of %d services would lose an address: %s",
			len(lost), plan.Before+cluster.total, names(lost)))
	}
	cut := !strings.HasSuffix(cfg.Text, "\n") && strings.HasSuffix(before, "\n")
	switch n := len(gone); {
	case n > 0 && cut:
		problems = append(problems, fmt.Sprintf("the file does not end with a newline, as if truncated, and lacks "+
			"%d of %d services: %s", n, plan.Before, names(gone)))
	case n >= guardedFrom && 2*n > plan.Before:
		problems = append(problems, fmt.Sprintf("%d of %d services would be removed: %s", n, plan.Before, names(gone)))
	}
	if len(problems) == 0 {
		return nil
	}
	maps.Copy(gone, lost)
	sum := sha256.Sum256([]byte(strings.Join(slices.Sorted(maps.Keys(gone)), "\n")))
	word := fmt.Sprintf("%x", sum[:4])
	if force == word || cfg.Force == word {
		return nil
	}
	return fmt.Errorf("%s; if intended: steelyard reload (or apply) --force %s, or force = %q at the top of the file",
		strings.Join(problems, "; "), word, word)
}

func names(set map[string]bool) string { return admin.List(slices.Sorted(maps.Keys(set))) }

// losers returns the services that changes remove, and the remaining ones that lose an address.
func losers(changes []lb.Change) (gone, lost map[string]bool) {
	gone, lost = map[string]bool{}, map[string]bool{}
	for _, c := range changes {
		switch service := c.Ends.Service; {
		case c.Op != lb.Removed:
		case c.Ends.Address.IsValid():
			lost[service] = true
		case c.Ends == (lb.FlowFilter{Service: service}):
			gone[service] = true
		}
	}
	return gone, lost
}

// heldTimeout bounds the query for the addresses of a cluster's Services.
const heldTimeout = 2 * time.Second

// fromCluster returns what a configuration takes from the cluster's Services now.
func (l *reloader) fromCluster(cfg *config.Config) losses {
	if l.status == nil || l.loaded.Kubernetes == nil {
		return losses{}
	}
	ctx, cancel := context.WithTimeout(context.Background(), heldTimeout)
	defer cancel()
	st, err := l.status(ctx)
	if err != nil {
		l.log.Warn("addresses of Services not compared with the pools", "err", err)
		return losses{}
	}
	if time.Since(l.started) < usedFor { // earlier packets are unknown
		for i := range st.Services {
			st.Services[i].Last = time.Time{}
		}
	}
	return lossesOf(st.Services, l.loaded, cfg)
}

// fromLastKnown returns what o.Config takes from the cluster's Services that the last agent knew.
func fromLastKnown(o Options, before *config.Config) losses {
	var stored clusterState
	if _, err := clusterFile(o.KeepDir).Load(&stored); err != nil {
		o.Log.Warn("addresses of Services not compared with the pools", "err", err)
		return losses{}
	}
	var all []lb.ServiceStatus
	for _, s := range stored.Services {
		for _, vip := range s.VIPs {
			all = append(all, lb.ServiceStatus{Service: s.Name, Address: vip})
		}
	}
	return lossesOf(all, before, o.Config)
}

func inPools(c *config.Config, a netip.Addr) bool {
	return slices.ContainsFunc(c.Pools, func(p config.Pool) bool { return p.Contains(a) })
}

// permit is like plan, but also fails if guard refuses the configuration.
func (l *reloader) permit(cfg *config.Config, force string) (*file.Plan, error) {
	plan, err := l.plan(cfg)
	if err == nil {
		err = l.guard(plan, cfg, force)
	}
	return plan, err
}

// chooseStart gives the file source the configuration at startup, or the last active one if the guard refuses it. It
// returns the chosen configuration, and why it refused the other.
func chooseStart(o Options, services *file.Source) (cfg *config.Config, refused, err error) {
	last, found, err := historyOf(o).Last()
	if err != nil {
		o.Log.Warn("last active file not read", "err", err)
	}
	if !found || err != nil || last == o.Config.Text {
		return o.Config, nil, services.Use(o.Config)
	}
	before, err := reload(nil, o.ConfigFile, []byte(last))
	if err == nil {
		err = services.Use(before)
	}
	if err != nil { // written by another version, or its secrets are gone
		o.Log.Warn("file not compared with the last active one", "err", err)
		return o.Config, nil, services.Use(o.Config)
	}
	plan, err := services.Plan(o.Config)
	if err != nil {
		return nil, nil, err
	}
	if err := guard(plan, o.Config, last, fromLastKnown(o, before), ""); err != nil {
		o.Log.Error("configuration rejected; the last active one is used", "config", o.ConfigFile, "err", err)
		return before, err, nil
	}
	services.Apply(plan)
	return o.Config, nil, nil
}

// guard is guard for a running agent.
func (l *reloader) guard(plan *file.Plan, cfg *config.Config, force string) error {
	if l.goesBack(cfg.Text) {
		return nil
	}
	return guard(plan, cfg, l.text(), l.fromCluster(cfg), force)
}
