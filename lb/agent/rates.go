package agent

import (
	"context"
	"log/slog"
	"sync"
	"time"

	"github.com/steelyard-lb/steelyard/datapath"
	"github.com/steelyard-lb/steelyard/lb"
)

const (
	ratesEvery = 5 * time.Second // how often the counters are read
	averaged   = 4               // how many of these intervals an average covers
)

// rates derives the recent traffic of frontends from their counters.
type rates struct {
	read func() (map[lb.Frontend]datapath.Traffic, error)
	log  *slog.Logger
	at   time.Time // of the last reading
	mu   sync.Mutex
	of   map[lb.Frontend]sample // guarded by mu
}

type sample struct {
	counters datapath.Traffic
	lb.Traffic
}

func (r *rates) run(ctx context.Context) error {
	tick := time.NewTicker(ratesEvery)
	defer tick.Stop()
	for {
		r.sample(time.Now())
		select {
		case <-ctx.Done():
			return nil
		case <-tick.C:
		}
	}
}

func (r *rates) sample(now time.Time) {
	counters, err := r.read()
	if err != nil {
		r.log.Debug("counters not read", "err", err)
		return
	}
	seconds := now.Sub(r.at).Seconds()
	add := func(average *float64, n uint64) { *average += (float64(n)/seconds - *average) / averaged }
	next := make(map[lb.Frontend]sample, len(counters))
	for f, c := range counters {
		x, known := r.of[f]
		was := x.counters
		if !known || c.Packets < was.Packets { // a new frontend
			x, was = sample{}, c
		}
		add(&x.PacketRate, c.Packets-was.Packets)
		add(&x.FlowRate, c.Flows-was.Flows)
		if c.Packets-was.Packets > c.Replies-was.Replies { // the rest came from clients
			x.Last, x.Before = now, x.PacketRate
		}
		x.counters, x.Packets = c, c.Packets
		next[f] = x
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	r.at, r.of = now, next
}

// mark adds the traffic to a status.
func (r *rates) mark(st *lb.Status) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for i := range st.Services {
		st.Services[i].Traffic = r.of[st.Services[i].Frontend()].Traffic
	}
}
