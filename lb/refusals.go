package lb

import (
	"slices"
	"time"
)

// refusalDelay is how long a service may lack a frontend that another one has before this is logged as an error. When
// an address moves between services, for example because they swap names, the new owner may be put first.
const refusalDelay = time.Second

// refusal is what a service lacks because another one has it.
type refusal struct {
	frontends []Frontend
	due       time.Time // when to log it; zero once logged
}

// refuse records the frontends of a service that another one has.
func (e *Engine) refuse(name string, frontends []Frontend) {
	switch {
	case len(frontends) == 0:
		delete(e.refused, name)
	case !slices.Equal(frontends, e.refused[name].frontends):
		e.refused[name] = refusal{frontends, time.Now().Add(refusalDelay)}
	}
}

// logRefusals logs the frontends that services have lacked for refusalDelay.
func (e *Engine) logRefusals(now time.Time) {
	for name, r := range e.refused {
		if r.due.IsZero() || r.due.After(now) {
			continue
		}
		e.refused[name] = refusal{frontends: r.frontends}
		for _, f := range r.frontends {
			e.o.Log.Error("frontend refused", "service", name, "frontend", f, "reason", "another service has it")
		}
	}
}

// nextRefusal returns when logRefusals is due, or zero if it is not.
func (e *Engine) nextRefusal() (next time.Time) {
	for _, r := range e.refused {
		if !r.due.IsZero() && (next.IsZero() || r.due.Before(next)) {
			next = r.due
		}
	}
	return next
}
