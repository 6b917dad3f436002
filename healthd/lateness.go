package healthd

import (
	"context"
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

// measureLateness starts one timer at a time, each for a quarter of timeout, so a quick response costs only one. stop
// ends the measurement and returns the timers' total delay.
func measureLateness(timeout time.Duration) (stop func() time.Duration) {
	l := &lateness{step: max(timeout/4, time.Millisecond)}
	l.mu.Lock()
	defer l.mu.Unlock()
	l.due = time.Now().Add(l.step)
	l.timer = time.AfterFunc(l.step, l.fire)
	return l.stop
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

func (l *lateness) stop() time.Duration {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.timer.Stop()
	l.timer = nil
	return l.sum + max(0, time.Since(l.due))
}

// isLate reports whether a timeout says nothing about the server, because this node was late by more than a quarter of
// it. If this node was late by less while most servers fail, the server is asked once more.
func (p *Prober) isLate(ctx context.Context, l *loop, checker Checker, late time.Duration) bool {
	timeout := l.check.Spec.Timeout
	if late > timeout/4 || late < timeout/16 {
		return late > timeout/4
	}
	p.mu.Lock()
	most := 2*int(p.failing.Load()) > p.count
	p.mu.Unlock()
	if !most {
		return false
	}
	ctx, cancel := context.WithTimeout(ctx, timeout/2)
	defer cancel()
	_, err := p.ask(ctx, l, checker)
	return err == nil
}
