package lab

import (
	"context"
	"net/http"
	"sync"
	"time"
)

// Traffic is a steady stream of HTTP requests, each over a connection of its own. Its methods may be called from any
// goroutine.
type Traffic struct {
	cancel context.CancelFunc
	ended  chan struct{}

	mu      sync.Mutex // guards samples
	samples []Sample
}

// Sample is one request of a Traffic.
type Sample struct {
	Start, End time.Time
	Server     string // empty when Err is not nil
	Err        error
}

// Traffic starts a request for url every so often, whether or not the last was answered; each has timeout to be
// answered. It goes on until Stop or the end of ctx.
func (h *Host) Traffic(ctx context.Context, url string, every, timeout time.Duration) *Traffic {
	ctx, cancel := context.WithCancel(ctx)
	t := &Traffic{cancel: cancel, ended: make(chan struct{})}
	go t.run(ctx, h.httpClient(), url, every, timeout)
	return t
}

func (t *Traffic) run(ctx context.Context, c *http.Client, url string, every, timeout time.Duration) {
	var asking sync.WaitGroup
	defer close(t.ended)
	defer c.CloseIdleConnections()
	defer asking.Wait()
	tick := time.NewTicker(every)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
		asking.Go(func() {
			s := Sample{Start: time.Now()}
			// Not from ctx: a request under way at Stop is answered, not counted as failed.
			ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), timeout)
			defer cancel()
			var r Result
			a, err := get(ctx, c, url)
			r.add(a, err)
			s.End, s.Err = time.Now(), r.Err()
			if s.Err == nil {
				s.Server = a.Server
			}
			t.mu.Lock()
			t.samples = append(t.samples, s)
			t.mu.Unlock()
		})
	}
}

// Stop ends the stream, waits for the requests under way, and returns all samples in the order in which they ended.
func (t *Traffic) Stop() []Sample {
	t.cancel()
	<-t.ended
	return t.Samples()
}

// Samples returns the requests that have ended so far, in the order in which they ended.
func (t *Traffic) Samples() []Sample {
	t.mu.Lock()
	defer t.mu.Unlock()
	return append([]Sample(nil), t.samples...)
}

// Between returns how the requests ended that were started from one moment until before another; a zero until is now.
func (t *Traffic) Between(from, until time.Time) Result {
	r := Result{Servers: map[string]int{}}
	for _, s := range t.Samples() {
		switch {
		case s.Start.Before(from) || (!until.IsZero() && !s.Start.Before(until)):
		case s.Err != nil:
			r.Errors = append(r.Errors, s.Err)
		default:
			r.Servers[s.Server]++
		}
	}
	return r
}
