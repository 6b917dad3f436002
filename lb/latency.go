package lb

import "time"

// Effect is the result of a change.
type Effect string

const (
	EffectDatapath  Effect = "datapath"  // the kernel forwards as planned
	EffectAnnounced Effect = "announced" // the announcers have sent a route
	EffectWithdrawn Effect = "withdrawn" // the announcers have withdrawn a route
)

// latency measures the time from the report of a change (by a source, a check or the datapath) to its effects. A
// service that waits for its first health checks does not count as changed yet. The first announcements of a run are
// not measured, because they wait for one another.
type latency struct {
	at      time.Time // when the change being handled was reported; zero if not measured
	observe func(Effect, time.Duration)
}

// took records that a change reported at since has taken effect.
func (l *latency) took(e Effect, since, now time.Time) {
	if l.observe != nil && !since.IsZero() {
		l.observe(e, now.Sub(since))
	}
}

// waiting records since when the changes of one object have been waiting for a consumer.
type waiting struct {
	next   time.Time // the first change that no call covers yet
	flight time.Time // the first change that the call in flight covers
}

func (w *waiting) changed(at time.Time) {
	if w.next.IsZero() {
		w.next = at
	}
}

func (w *waiting) begin() { w.flight, w.next = w.next, time.Time{} }

// done returns when the first change that the call covered was reported.
func (w *waiting) done() (since time.Time) {
	since, w.flight = w.flight, time.Time{}
	return since
}

// failed records that the changes reported since then are still waiting, because the call failed.
func (w *waiting) failed(since time.Time) {
	if !since.IsZero() {
		w.next = since
	}
}
