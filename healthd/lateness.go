package healthd

import (
	"errors"
	"sync"
	"time"
)

// errLate replaces the timeout of a probe if this node itself was late.
var errLate = ownError{errors.New("this node lacks CPU time, so a response may have been delayed")}

// lateness measures how late the timers of one probe fire. If this node does not serve timers and sockets in time, a
// missing response says nothing about the server.
type lateness struct {
	mu    sync.Mutex // guards all below
	step  time.Duration
	due   time.Time
	sum   time.Duration
	timer *time.Timer
}

// measureLateness starts one timer at a time, each for a quarter of timeout, so a quick response costs only one.
func measureLateness(timeout time.Duration) *lateness {
	l := &lateness{step: max(timeout/4, time.Millisecond)}
	l.mu.Lock()
	defer l.mu.Unlock()
	l.due = time.Now().Add(l.step)
	l.timer = time.AfterFunc(l.step, l.fire)
	return l
}

func (l *lateness) fire() {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.timer == nil {
		return
	}
	now := time.Now()
	l.sum += now.Sub(l.due)
	l.due = now.Add(l.step)
	l.timer.Reset(l.step)
}

// stop ends the measurement. It reports whether the timers' total delay exceeds a quarter of the timeout.
func (l *lateness) stop() bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.timer.Stop()
	l.timer = nil
	return l.sum+max(0, time.Since(l.due)) > l.step
}
