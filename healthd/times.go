package healthd

import (
	"math"
	"slices"
	"time"

	"github.com/steelyard-lb/steelyard/lb"
)

// times holds the durations of a check's last probes in microseconds, at most 60.
type times struct {
	took [60]uint32
	n    int // probes so far
}

func (t *times) add(took time.Duration) {
	t.took[t.n%len(t.took)] = uint32(min(took.Microseconds(), math.MaxUint32))
	t.n++
}

// summary returns the last duration and the 95th percentile (nearest rank).
func (t *times) summary() lb.ProbeTimes {
	if t.n == 0 {
		return lb.ProbeTimes{}
	}
	recent := slices.Clone(t.took[:min(t.n, len(t.took))])
	slices.Sort(recent)
	p95 := recent[(len(recent)*95+99)/100-1]
	return lb.ProbeTimes{Last: float64(t.took[(t.n-1)%len(t.took)]) / 1e6, P95: float64(p95) / 1e6}
}

func (l *loop) observe(took time.Duration) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.times.add(took)
}

// Times returns the durations of a check's recent probes, including failed ones but not inconclusive ones.
func (p *Prober) Times(k lb.CheckKey) lb.ProbeTimes {
	p.mu.Lock()
	l := p.checks[k.Service][k]
	p.mu.Unlock()
	if l == nil {
		return lb.ProbeTimes{}
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.times.summary()
}
