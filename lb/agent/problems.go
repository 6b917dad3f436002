package agent

import (
	"log/slog"
	"maps"
	"slices"
	"sync"

	"github.com/steelyard-lb/steelyard/lb"
)

// problems tracks the parts of the agent that currently do not work, each with its error. The status shows them, and
// changes are logged.
type problems struct {
	log *slog.Logger
	mu  sync.Mutex // guards all below
	of  map[string]string
}

func newProblems(log *slog.Logger) *problems { return &problems{log: log, of: map[string]string{}} }

// set records the error of a part; nil means that it works.
func (p *problems) set(part string, err error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	was, had := p.of[part]
	switch {
	case err != nil && was != err.Error():
		p.of[part] = err.Error()
		p.log.Error(part, "err", err)
	case err == nil && had:
		delete(p.of, part)
		p.log.Info("part works again", "part", part)
	}
}

// findings returns a finding for each part that does not work.
func (p *problems) findings() (all []lb.Finding) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, part := range slices.Sorted(maps.Keys(p.of)) {
		all = append(all, lb.FoundPartFails.About(part, "%s: %s", part, p.of[part]))
	}
	return all
}

// problem returns the function that sets the error of a part.
func (o Options) problem(part string) func(error) {
	return func(err error) {
		if o.problems != nil {
			o.problems.set(part, err)
		}
	}
}
