package agent

import (
	"log/slog"
	"maps"
	"slices"
	"sync"
)

// problems has the parts of the agent that do not work at present, each with its error. The status shows them. A change
// is logged.
type problems struct {
	log *slog.Logger
	mu  sync.Mutex // guards all below
	of  map[string]string
}

func newProblems(log *slog.Logger) *problems { return &problems{log: log, of: map[string]string{}} }

// set records the error of a part, or with nil that it works.
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
		p.log.Info("works again", "part", part)
	}
}

// list returns the texts for the status.
func (p *problems) list() (list []string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, part := range slices.Sorted(maps.Keys(p.of)) {
		list = append(list, part+": "+p.of[part])
	}
	return list
}

// problem returns the function that sets the error of a part.
func (o Options) problem(part string) func(error) {
	return func(err error) {
		if o.problems != nil {
			o.problems.set(part, err)
		}
	}
}
