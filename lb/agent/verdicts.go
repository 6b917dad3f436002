package agent

import (
	"context"
	"log/slog"
	"net/netip"
	"time"

	"github.com/steelyard-lb/steelyard/lb"
	"github.com/steelyard-lb/steelyard/lb/state"
)

const (
	// verdictsVersion is the version of savedVerdicts' layout.
	verdictsVersion = 1
	// verdictsInterval is the time between two writes of the file.
	verdictsInterval = time.Second
	// verdictsRefresh is the time after which an unchanged file is rewritten, so that its age shows when the agent
	// ended.
	verdictsRefresh = 10 * time.Second
	// verdictsMaxAge is the maximum age at which startup uses the file. It covers a restart and an upgrade; a backend
	// that was healthy an hour ago must be probed before it is announced.
	verdictsMaxAge = 2 * time.Minute
)

// savedVerdicts are the results of the health checks in the file.
type savedVerdicts struct {
	Written  time.Time      `json:"written"`
	Verdicts []savedVerdict `json:"verdicts"`
}

type savedVerdict struct {
	Service string         `json:"service"`
	Backend netip.AddrPort `json:"backend"`
	Port    *lb.Port       `json:"port,omitempty"` // of the key; nil if zero
	State   lb.State       `json:"state"`
	Reason  string         `json:"reason"`
	Weight  int            `json:"weight"`
	At      time.Time      `json:"at"`
}

// verdictStore stores the results of the health checks for a restart. Without them, the first probe after the restart
// would decide alone.
type verdictStore struct {
	file     *state.File
	earlier  map[lb.CheckKey]lb.Health // from the previous run
	problems *problems
}

// openVerdictStore reads the previous run's results from a directory. Without a usable file there are none.
func openVerdictStore(dir string, log *slog.Logger, p *problems) *verdictStore {
	v := &verdictStore{file: state.New(dir, "verdicts", verdictsVersion), problems: p}
	var saved savedVerdicts
	if _, err := v.file.Load(&saved); err != nil {
		log.Warn("health check results of the previous run not read", "err", err)
		return v
	}
	if age := time.Since(saved.Written); age < 0 || age > verdictsMaxAge {
		return v
	}
	v.earlier = make(map[lb.CheckKey]lb.Health, len(saved.Verdicts))
	for _, s := range saved.Verdicts {
		// The file may have been written up to verdictsInterval before the agent ended. A backend that was unhealthy
		// then may have recovered, and its flows must not end, so its state is unknown.
		if s.State != lb.StateHealthy {
			continue
		}
		key := lb.CheckKey{Service: s.Service, Backend: s.Backend}
		if s.Port != nil {
			key.Port = *s.Port
		}
		v.earlier[key] = lb.Health{Key: key, State: s.State, Reason: s.Reason, Weight: s.Weight, At: s.At}
	}
	return v
}

// health returns the previous run's result of a check.
func (v *verdictStore) health(k lb.CheckKey) (lb.Health, bool) {
	h, ok := v.earlier[k]
	return h, ok
}

// verdicts are the results to store.
type verdicts interface {
	Health() []lb.Health
	Changes() uint64 // differs after a change of a state
}

// run writes the results when they have changed, until ctx ends.
func (v *verdictStore) run(ctx context.Context, from verdicts) error {
	tick := time.NewTicker(verdictsInterval)
	defer tick.Stop()
	var written time.Time
	var last uint64
	stored := -1 // number of results
	for {
		n := from.Changes()
		if n != last || time.Since(written) >= verdictsRefresh && stored != 0 || ctx.Err() != nil {
			all := from.Health()
			err := v.save(all)
			v.problems.set("health check results not stored; a restart probes all backends again", err)
			if last, written, stored = n, time.Now(), len(all); err != nil {
				stored = -1 // to be tried again
			}
		}
		if ctx.Err() != nil {
			return nil
		}
		select {
		case <-ctx.Done():
		case <-tick.C:
		}
	}
}

func (v *verdictStore) save(all []lb.Health) error {
	s := savedVerdicts{Written: time.Now(), Verdicts: make([]savedVerdict, 0, len(all))}
	for _, h := range all {
		x := savedVerdict{h.Key.Service, h.Key.Backend, nil, h.State, h.Reason, h.Weight, h.At}
		if port := h.Key.Port; port != (lb.Port{}) {
			x.Port = &port
		}
		s.Verdicts = append(s.Verdicts, x)
	}
	return v.file.Save(s)
}
