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

// engineHealth answers health requests from what the engine and the service proxy publish, so that requests cost them
// nothing.
type engineHealth struct {
	engine interface {
		Progress() lb.Progress
		InForce(service string) bool
	}
	// rules are this node's as service proxy, or nil if another program is the proxy.
	rules interface {
		RulesInForce() bool
		RulesBehind() time.Time
	}
}

var errEngine = errors.New("the engine does not respond")

// behind returns when the kernel began to lack part of the plan or of the rules, or zero if it lacks nothing. An error
// means that the engine does not respond.
func (h *engineHealth) behind() (time.Time, error) {
	p := h.engine.Progress()
	since := p.Behind
	if h.rules != nil {
		if b := h.rules.RulesBehind(); since.IsZero() || !b.IsZero() && b.Before(since) {
			since = b
		}
	}
	if !p.Waiting.IsZero() && time.Since(p.Waiting) > engineTimeout {
		return since, errEngine
	}
	return since, nil
}

// applied reports whether the first complete state is in force in the kernel.
func (h *engineHealth) applied() bool {
	return h.engine.Progress().Applied && (h.rules == nil || h.rules.RulesInForce())
}

// inForce reports whether the datapath serves a service.
func (h *engineHealth) inForce(service string) bool { return h.engine.InForce(service) }
