package lb

import "time"

// Effect is what a change leads to.
type Effect string

const (
	EffectDatapath  Effect = "datapath"  // the kernel forwards as planned
	EffectAnnounced Effect = "announced" // the announcers have sent a route
	EffectWithdrawn Effect = "withdrawn" // they have withdrawn one
)

// latency measures the time from the report of a change, by a source, a check or the datapath, to its effects. A
// service that waits for its first health checks has not changed yet. The first announcements of a run are not
// measured: they wait for one another.
type latency struct {
	at      time.Time // the report of the change that is being handled; zero: it is not measured
	observe func(Effect, time.Duration)
}

// took records that a change of this time has an effect.
func (l *latency) took(e Effect, since, now time.Time) {
	if l.observe != nil && !since.IsZero() {
		l.observe(e, now.Sub(since))
	}
}

// waiting is since when changes of one object wait for a consumer.
type waiting struct {
	next   time.Time // the first change that no call covers
	flight time.Time // the first change that the call in flight covers
}

func (w *waiting) changed(at time.Time) {
	if w.next.IsZero() {
		w.next = at
	}
}

func (w *waiting) begin() { w.flight, w.next = w.next, time.Time{} }

// done returns the first change that the call has covered.
func (w *waiting) done() (since time.Time) {
	since, w.flight = w.flight, time.Time{}
	return since
}

// failed records that the call has not covered the changes since then.
func (w *waiting) failed(since time.Time) {
	if !since.IsZero() {
		w.next = since
	}
}
