package traffic

import (
	"context"
	"net/http"
	"sync"
	"time"
)

// Stream sends HTTP requests at a constant rate, each over its own connection. Its methods may be called from any
// goroutine.
type Stream struct {
	cancel context.CancelFunc
	ended  chan struct{}

	mu      sync.Mutex // guards samples
	samples []Sample
}

// Sample is one request of a Stream.
type Sample struct {
	Start, End time.Time
	Server     string // empty if Err is not nil
	Err        error
}

// maxInFlight limits a Stream's open requests, because each request that waits for a connection occupies a thread.
const maxInFlight = 200

// Stream starts a request for url at every interval, whether or not the previous one has been answered, while fewer
// than maxInFlight are open. Requests fail after timeout. The stream ends with Stop or ctx.
func (c Client) Stream(ctx context.Context, url string, interval, timeout time.Duration) *Stream {
	ctx, cancel := context.WithCancel(ctx)
	t := &Stream{cancel: cancel, ended: make(chan struct{})}
	go t.run(ctx, c.httpClient(), url, interval, timeout)
	return t
}

func (t *Stream) run(ctx context.Context, c *http.Client, url string, interval, timeout time.Duration) {
	var requests sync.WaitGroup
	places := make(chan struct{}, maxInFlight)
	defer close(t.ended)
	defer c.CloseIdleConnections()
	defer requests.Wait()
	tick := time.NewTicker(interval)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
		select {
		case <-ctx.Done():
			return
		case places <- struct{}{}:
		}
		requests.Go(func() {
			defer func() { <-places }()
			s := Sample{Start: time.Now()}
			// Not derived from ctx, so that Stop does not make a request in flight fail.
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

// Stop ends the stream, waits for requests in flight, and returns all samples in the order of their ends.
func (t *Stream) Stop() []Sample {
	t.cancel()
	<-t.ended
	return t.Samples()
}

// Samples returns the finished requests in the order of their ends.
func (t *Stream) Samples() []Sample {
	t.mu.Lock()
	defer t.mu.Unlock()
	return append([]Sample(nil), t.samples...)
}

// Between returns the outcome of requests started from from on and before until. A zero until means now.
func (t *Stream) Between(from, until time.Time) Result {
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
