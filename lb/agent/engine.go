package agent

import (
	"context"
	"errors"
	"time"

	"github.com/steelyard-lb/steelyard/lb"
)

// engineTimeout is the time in which a working engine responds; the watchdog and the health ports use it.
const engineTimeout = 5 * time.Second

// checkEngine returns an error when the engine does not respond.
func checkEngine(e interface {
	Behind(context.Context) (time.Time, error)
}) error {
	ctx, cancel := context.WithTimeout(context.Background(), engineTimeout)
	defer cancel()
	_, err := e.Behind(ctx)
	return err
}

// engineHealth answers health requests from what the engine publishes, so that requests cost the engine nothing.
type engineHealth struct {
	engine interface {
		Progress() lb.Progress
		InForce(service string) bool
	}
}

var errEngine = errors.New("the engine does not respond")

// behind returns when the kernel began to lack part of the plan, or zero if it lacks nothing. An error means that the
// engine does not respond.
func (h engineHealth) behind() (time.Time, error) {
	p := h.engine.Progress()
	if !p.Waiting.IsZero() && time.Since(p.Waiting) > engineTimeout {
		return p.Behind, errEngine
	}
	return p.Behind, nil
}

// applied reports whether the first complete state was applied to the datapath.
func (h engineHealth) applied() bool { return h.engine.Progress().Applied }

// inForce reports whether the datapath serves a service.
func (h engineHealth) inForce(service string) bool { return h.engine.InForce(service) }
