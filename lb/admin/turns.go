package admin

import (
	"bytes"
	"errors"
	"net/http"
	"sync/atomic"
	"time"
)

// Limits on the work for requests over TCP. Readers must not take the CPU from the health checks.
const (
	// handlers is how many requests are processed concurrently. The others wait for up to turnTimeout.
	handlers    = 4
	turnTimeout = 2 * time.Second
	// unreadMax bounds the bytes of answers that clients have not yet read. Small answers fit into any socket's buffer.
	unreadMax, smallAnswer = 64 << 20, 64 << 10
	// walkTime bounds a walk through the flows; one walk runs at a time.
	walkTime = 200 * time.Millisecond
)

// inTurn lets h process only a few requests concurrently. A client that does not read its answer delays nobody, because
// the answer is written outside the turn.
func inTurn(h http.Handler) http.Handler {
	turns := make(chan struct{}, handlers)
	unread := new(atomic.Int64)
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		late := time.NewTimer(turnTimeout)
		defer late.Stop()
		select {
		case turns <- struct{}{}:
		case <-r.Context().Done():
			return
		case <-late.C:
			writeBusy(w, "too many requests")
			return
		}
		a := answer{ResponseWriter: w, status: http.StatusOK}
		func() {
			defer func() { <-turns }()
			h.ServeHTTP(&a, r)
		}()
		size := int64(a.body.Len())
		defer unread.Add(-size)
		if all := unread.Add(size); all > unreadMax && all > size && size > smallAnswer {
			writeBusy(w, "too many unread responses")
			return
		}
		w.WriteHeader(a.status)
		w.Write(a.body.Bytes())
	})
}

// answer buffers the status and body of an answer.
type answer struct {
	http.ResponseWriter
	status int
	body   bytes.Buffer
}

func (a *answer) WriteHeader(status int) { a.status = status }

func (a *answer) Write(p []byte) (int, error) { return a.body.Write(p) }

// writeBusy refuses a request that may succeed later.
func writeBusy(w http.ResponseWriter, why string) {
	w.Header().Set("Retry-After", "1")
	writeError(w, http.StatusServiceUnavailable, errors.New(why))
}
