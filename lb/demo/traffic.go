package demo

import (
	"context"
	"fmt"
	"time"

	"github.com/steelyard-lb/steelyard/e2e/lab/traffic"
)

// A steady stream: each client makes a request every 10 ms, over a connection of its own, and gives up after a second.
const (
	requestEvery = 10 * time.Millisecond
	// A SYN that meets an old connection of the same port on a server (TIME_WAIT) is sent again after a second (RFC 6298).
	requestTimeout = 2500 * time.Millisecond
)

// stream is the traffic of both clients, over both families.
type stream []*traffic.Stream

func (n *network) stream(ctx context.Context) stream {
	var s stream
	for i, vip := range vips {
		s = append(s, n.clients[i].Stream(ctx, url(vip), requestEvery, requestTimeout))
	}
	return s
}

// stop ends the stream and waits for the requests under way.
func (s stream) stop() {
	for _, t := range s {
		t.Stop()
	}
}

// since returns how the requests ended that were started after t.
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

// lastFailure returns when the last request was started, at or after t, that failed; t when none did.
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

// calm is how many requests in a row must be answered before a disturbance counts as over: with 200 a second, and each
// given up after two and a half, as long as an unanswered request may still become a failure.
const calm = 550

// settled returns an error unless at least calm requests have been answered since the last failure at or after t.
func (s stream) settled(t time.Time) error {
	if r := s.since(s.lastFailure(t)); r.Answered() < calm {
		return fmt.Errorf("%d requests in a row answered, %d failed in all", r.Answered(), len(s.since(t).Errors))
	}
	return nil
}
