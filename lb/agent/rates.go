package agent

import (
	"context"
	"errors"
	"log/slog"
	"math"
	"net/netip"
	"sync"
	"time"

	"github.com/steelyard-lb/steelyard/datapath"
	"github.com/steelyard-lb/steelyard/lb"
)

const (
	ratesEvery = 5 * time.Second        // how often the counters are read while nobody asks
	ratesFresh = 500 * time.Millisecond // the maximum age of figures that somebody asks for
	averaged   = 20 * time.Second       // the time constant of the averages
)

// rates derives the recent traffic of frontends and backends from their counters.
type rates struct {
	read           func() (map[lb.Frontend]datapath.Traffic, map[netip.AddrPort]datapath.Traffic, error)
	readHandshakes func() (map[netip.AddrPort]lb.Handshakes, error)
	log            *slog.Logger

	mu        sync.Mutex // guards all below
	at        time.Time  // of the last reading
	frontends samples[lb.Frontend]
	backends  samples[netip.AddrPort]
	// handshakes holds the counters at the last reading, and recent those of about the last minute: older ones count
	// less.
	handshakes, recent map[netip.AddrPort]lb.Handshakes
}

// forgotten is the number of recent handshakes below which a backend has none: after a single one, a minute later.
const forgotten = 0.05

type sample struct {
	lb.Traffic        // its rates are averages
	replies    uint64 // of its packets, those from servers
}

type samples[K comparable] map[K]sample

func (r *rates) run(ctx context.Context) error {
	tick := time.NewTicker(ratesEvery)
	defer tick.Stop()
	for {
		r.mu.Lock()
		r.sample(time.Now())
		r.mu.Unlock()
		select {
		case <-ctx.Done():
			return nil
		case <-tick.C:
		}
	}
}

// sample reads the counters. r.mu is held.
func (r *rates) sample(now time.Time) {
	frontends, backends, err := r.read()
	handshakes, errHandshakes := r.readHandshakes()
	if err := errors.Join(err, errHandshakes); err != nil {
		r.log.Debug("counters not read", "err", err)
		return
	}
	took := now.Sub(r.at)
	r.at, r.frontends, r.backends = now, r.frontends.next(frontends, now, took), r.backends.next(backends, now, took)
	r.recent, r.handshakes = recentHandshakes(r.recent, r.handshakes, handshakes, took), handshakes
}

// recentHandshakes returns the recent handshakes after another reading of the counters.
func recentHandshakes(recent, was, now map[netip.AddrPort]lb.Handshakes, took time.Duration,
) map[netip.AddrPort]lb.Handshakes {
	next := make(map[netip.AddrPort]lb.Handshakes, len(now))
	for at, h := range now {
		before := was[at]
		switch {
		case was == nil: // those of an earlier agent are not recent
			before = h
		case before.Exceeds(h): // a new backend, whose counters begin at zero
			before = lb.Handshakes{}
		}
		h.Add(before, -1)
		h.Add(recent[at], math.Exp(-took.Seconds()/averaged.Seconds()))
		if h.Total() > forgotten {
			next[at] = h
		}
	}
	return next
}

// next returns the traffic after another reading of the counters.
func (s samples[K]) next(counters map[K]datapath.Traffic, now time.Time, took time.Duration) samples[K] {
	weight := 1 - math.Exp(-took.Seconds()/averaged.Seconds())
	next := make(samples[K], len(counters))
	for k, c := range counters {
		x := sample{lb.Traffic{Packets: c.Packets, Bytes: c.Bytes, Flows: c.Flows, Read: now}, c.Replies}
		if was, known := s[k]; known && c.Replies >= was.replies && x.Since(was.Traffic) {
			average := func(rate *float64, was float64) { *rate = was + weight*(*rate-was) }
			average(&x.PacketRate, was.PacketRate)
			average(&x.BitRate, was.BitRate)
			average(&x.FlowRate, was.FlowRate)
			x.Last, x.Before = was.Last, was.Before
			if c.Packets-was.Packets > c.Replies-was.replies { // the rest came from clients
				x.Last, x.Before = now, x.PacketRate
			}
		}
		next[k] = x
	}
	return next
}

// mark adds the traffic and the durations of probes to a status.
func (r *rates) mark(st *lb.Status, now time.Time, probes func(lb.CheckKey) lb.ProbeTimes) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if now.Sub(r.at) >= ratesFresh {
		r.sample(now)
	}
	for i := range st.Services {
		st.Services[i].Traffic = r.frontends[st.Services[i].Frontend()].Traffic
	}
	st.MarkBackends(func(at netip.AddrPort) lb.Traffic { return r.backends[at].Traffic },
		func(at netip.AddrPort) lb.Handshakes { return r.recent[at] }, probes)
}
