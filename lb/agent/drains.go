package agent

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"

	"github.com/google/renameio/v2"

	"github.com/steelyard-lb/steelyard/lb"
	"github.com/steelyard-lb/steelyard/lb/state"
)

// drainStore stores an operator's drains and weights. They survive restarts of the agent, but not a reboot. They are
// active even if they cannot be stored.
type drainStore struct {
	path   string
	engine drainer
	kept   *keeper
	// waiting returns the services that wait for an address. It is nil without a cluster.
	waiting func() []lb.ServiceStatus

	mu      sync.Mutex // guards current
	current lb.Drains
}

// drainer is the part of lb.Engine that a drainStore needs.
type drainer interface {
	Status(context.Context) (lb.Status, error)
	Drain(lb.Drains)
}

// openDrainStore reads the drains from a directory, which need not exist, and passes them to the engine. On an error it
// returns a store without drains.
func openDrainStore(dir string, e drainer, p *problems) (*drainStore, error) {
	d := &drainStore{
		path: filepath.Join(dir, "drained.json"), engine: e,
		kept: newKeeper("drains not stored; a restart of the agent undoes the last change", p),
	}
	text, err := os.ReadFile(d.path)
	if errors.Is(err, fs.ErrNotExist) {
		return d, nil
	}
	if err == nil {
		err = json.Unmarshal(text, &d.current)
	}
	if err != nil {
		d.current = lb.Drains{}
		return d, fmt.Errorf("read the drains from %s: %w", d.path, err)
	}
	e.Drain(d.current)
	return d, nil
}

// now returns the active drains.
func (d *drainStore) now() lb.Drains {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.current
}

// set drains or undrains a target, and returns all drains. A target that does not exist can only be undrained, if it is
// drained.
func (d *drainStore) set(ctx context.Context, t lb.DrainTarget, on bool) (lb.Drains, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if t.Service != "" && !d.current.Has(t) {
		if err := d.drainable(ctx, t); err != nil {
			return d.current, err
		}
	}
	d.use(d.current.With(t, on))
	return d.current, nil
}

// setWeight sets the weight of a server, or as configured if it is negative, and returns all drains and weights.
func (d *drainStore) setWeight(ctx context.Context, t lb.DrainTarget, weight int) (lb.Drains, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if weight >= 0 {
		if err := d.drainable(ctx, t); err != nil {
			return d.current, err
		}
	}
	d.use(d.current.WithWeight(t, weight))
	return d.current, nil
}

// use activates and stores drains.
func (d *drainStore) use(next lb.Drains) {
	d.kept.save(func() error { return state.WriteError(d.path, d.write(next)) })
	d.current = next
	d.engine.Drain(next)
}

// ended returns which drains end because of these changes of the configuration.
func (d *drainStore) ended(changes []lb.Change) []lb.Change {
	_, ended := d.now().After(changes)
	return ended
}

// after ends these drains, once the engine has the changes.
func (d *drainStore) after(changes []lb.Change) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if next, ended := d.current.After(changes); len(ended) > 0 {
		d.use(next)
	}
}

// drainable says why a target cannot be drained, or its weight cannot be set, or returns nil.
func (d *drainStore) drainable(ctx context.Context, t lb.DrainTarget) error {
	st, err := d.engine.Status(ctx)
	if err != nil {
		return err
	}
	if t.Address.IsValid() && strings.Contains(t.Service, "/") {
		return errors.New("Kubernetes decides which pods get connections; name a server of a [[service]]")
	}
	if err := lb.NoService(t.Service, st.Services); err == nil {
		if t.Address.IsValid() && !t.Among(st.Backends) {
			return fmt.Errorf("there is no backend %s; see \"steelyard backends\"", t)
		}
		return nil
	}
	var waiting []lb.ServiceStatus
	if d.waiting != nil {
		waiting = d.waiting()
	}
	if err := lb.NoService(t.Service, slices.Concat(st.Services, waiting)); err != nil {
		return err
	}
	return fmt.Errorf("service %q has no address yet, so there is nothing to drain; see \"steelyard services\"",
		t.Service)
}

// write replaces the file atomically, so that an agent killed in the middle leaves a file that the next one can read.
func (d *drainStore) write(drains lb.Drains) error {
	text, err := json.Marshal(drains)
	if err != nil {
		return err
	}
	dir := filepath.Dir(d.path)
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return err
	}
	return renameio.WriteFile(d.path, text, 0o644, renameio.WithTempDir(dir))
}
