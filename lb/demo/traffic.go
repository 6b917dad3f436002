package demo

import (
	"context"
	"fmt"
	"time"

	"github.com/steelyard-lb/steelyard/e2e/lab/traffic"
)

// Each client makes a request over a new connection in each interval.
const (
	requestInterval = 10 * time.Millisecond
	shellInterval   = 100 * time.Millisecond // while a shell is open
	// A SYN for a port that is in TIME_WAIT on a server is retransmitted after a second (RFC 6298).
	requestTimeout = 2500 * time.Millisecond
)

// stream is the traffic of both clients, over both families.
type stream []*traffic.Stream

func (n *network) stream(ctx context.Context, interval time.Duration) stream {
	var s stream
	for i, vip := range vips {
		s = append(s, n.clients[i].Stream(ctx, url(vip), interval, requestTimeout))
	}
	return s
}

// stop ends the stream and waits for the requests in flight.
func (s stream) stop() {
	for _, t := range s {
		t.Stop()
	}
}

// since returns the results of requests started after t.
func (s stream) since(t time.Time) traffic.Result {
	sum := traffic.Result{Servers: map[string]int{}}
	for _, one := range s {
		r := one.Between(t, time.Time{})
		sum.Errors = append(sum.Errors, r.Errors...)
		for name, c := range r.Servers {
			sum.Servers[name] += c
		}
	}
	return sum
}

// lastFailure returns the start of the last failed request that was started at or after t, or t if there is none.
func (s stream) lastFailure(t time.Time) time.Time {
	last := t
	for _, one := range s {
		for _, x := range one.Samples() {
			if x.Err != nil && x.Start.After(last) {
				last = x.Start
			}
		}
	}
	return last
}

// calm is the number of requests that must be answered in a row before a disturbance is over. At 200 per second this
// takes longer than requestTimeout, so every earlier request has ended.
const calm = 550

// settled returns an error unless at least calm requests have been answered since the last failure at or after t.
func (s stream) settled(t time.Time) error {
	if r := s.since(s.lastFailure(t)); r.Answered() < calm {
		return fmt.Errorf("%d requests in a row answered, %d failed in all", r.Answered(), len(s.since(t).Errors))
	}
	return nil
}
