package agent

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"hash/fnv"
	"io/fs"
	"log/slog"
	"maps"
	"os"
	"path/filepath"
	"runtime/debug"
	"strings"
	"sync"
	"time"

	"github.com/steelyard-lb/steelyard/lb"
	"github.com/steelyard-lb/steelyard/lb/printable"
	"github.com/steelyard-lb/steelyard/lb/state"
)

// steadyTime is how long an agent runs before it trusts its objects. After endsMax consecutive agents have ended in a
// panic before that, caution begins.
const (
	steadyTime = 10 * time.Minute
	endsMax    = 3
)

// caution sits between the cluster source and the engine. An object that makes the agent panic may be read again at
// each start, so after endsMax panics in a row the agent starts without the latest changes. Until it has run for
// steadyTime, new Services and changes to others do not reach the kernel, and weights reported by servers do not count.
type caution struct {
	lb.Sink
	ends     *state.File // number of consecutive agents that ended in a panic
	trusted  *state.File // configurations of services by name, as config returns them
	problems *problems
	log      *slog.Logger

	mu     sync.Mutex // guards all below; held during calls to Sink, to keep their order
	on     bool
	proven map[string]string      // of trusted, while on
	back   map[string]*lb.Service // services kept back
	now    map[string]*lb.Service
	before map[string]string // configurations at the previous tick
}

// cautionProblem is the name of the problem that is set while caution is on.
const cautionProblem = "start without the latest input"

func openCaution(to lb.Sink, dir string, p *problems, log *slog.Logger) *caution {
	c := &caution{
		Sink: to, ends: state.New(dir, "ends", 1), trusted: state.New(dir, "trusted", 1), problems: p, log: log,
		back: map[string]*lb.Service{}, now: map[string]*lb.Service{},
	}
	n := 0
	if _, err := c.ends.Load(&n); err != nil {
		log.Warn("record of panics not read", "err", err)
		n = 0
	}
	if panicked(dir, log) {
		n++
		c.save(c.ends, n)
	}
	if n < endsMax {
		return c
	}
	c.on = true
	if _, err := c.trusted.Load(&c.proven); err != nil {
		log.Warn("trusted services not read", "err", err)
	}
	p.set(cautionProblem, fmt.Errorf("%d agents in a row panicked within %s; new Services and changes "+
		"to others do not take effect, and reported weights are ignored, for %s; the log has the cause",
		n, steadyTime, steadyTime))
	return c
}

// panicked reports whether the previous agent ended in a panic, and makes the runtime write the report of the next
// panic to a file in dir. A killed agent leaves no report, so it does not count.
func panicked(dir string, log *slog.Logger) bool {
	path := filepath.Join(dir, "panic")
	was, err := os.ReadFile(path)
	if len(was) > 0 {
		last := path + ".last"
		err = os.Rename(path, last)
		what, _, _ := strings.Cut(string(was), "\n")
		log.Error("the previous agent panicked", "text", printable.Cut(what), "file", last)
	}
	if err == nil || errors.Is(err, fs.ErrNotExist) {
		var f *os.File
		if f, err = os.OpenFile(path, os.O_CREATE|os.O_WRONLY, 0o600); err == nil {
			err = errors.Join(debug.SetCrashOutput(f, debug.CrashOptions{}), f.Close()) // the runtime has a duplicate
		}
	}
	if err != nil {
		log.Warn("panic reports cannot be stored", "err", err)
	}
	return len(was) > 0
}

func (c *caution) save(f *state.File, v any) {
	if err := f.Save(v); err != nil {
		c.log.Warn("state not stored", "file", f.Path(), "err", err)
	}
}

// config returns a hash of what users configure in a service, without its backends, which change all the time.
func (c *caution) config(s *lb.Service) string {
	type port struct {
		lb.Port
		Last uint16
	}
	var ports []port
	for _, p := range s.Ports {
		ports = append(ports, port{p.Port, p.Last})
	}
	h := fnv.New64a()
	err := json.NewEncoder(h).Encode([]any{
		s.VIPs, ports, s.Policy, s.Algorithm, s.Method, s.Affinity, s.Allow, s.VIPPerNode,
	})
	return fmt.Sprintf("%x %v", h.Sum64(), err)
}

// Put implements lb.Sink.
func (c *caution) Put(s *lb.Service) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.now[s.Name] = s
	if c.on && c.proven[s.Name] != c.config(s) {
		c.back[s.Name] = s
		s = s.Freeze()
	} else {
		delete(c.back, s.Name)
	}
	c.Sink.Put(s)
}

// Delete implements lb.Sink.
func (c *caution) Delete(name string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	delete(c.now, name)
	delete(c.back, name)
	c.Sink.Delete(name)
}

// health returns h, without the server's weight while caution is on.
func (c *caution) health(h lb.Health) lb.Health {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.on {
		h.Weight = -1
	}
	return h
}

// run trusts services that have existed for steadyTime, until ctx ends. It then resets the number of panics.
func (c *caution) run(ctx context.Context) error {
	tick := time.NewTicker(steadyTime)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			c.save(c.ends, 0)
			return nil
		case <-tick.C:
			c.steady()
		}
	}
}

func (c *caution) steady() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.save(c.ends, 0)
	if c.before != nil {
		c.save(c.trusted, c.before)
	}
	c.before = map[string]string{}
	for name, s := range c.now {
		c.before[name] = c.config(s)
	}
	if !c.on {
		return
	}
	c.on = false
	c.problems.set(cautionProblem, nil)
	for s := range maps.Values(c.back) {
		c.Sink.Put(s)
	}
	clear(c.back)
}
