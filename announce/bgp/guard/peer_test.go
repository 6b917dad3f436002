package guard

import (
	"cmp"
	"context"
	"log/slog"
	"slices"
	"sync/atomic"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/steelyard-lb/steelyard/lb"
)

// A passive guard does not connect, until it is passive no more.
func TestPassive(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFixture(t, func(_ *Options, c *Config) { c.Passive = true })
		time.Sleep(time.Hour)
		if len(f.outer) > 0 {
			t.Fatal("it connects")
		}
		f.cfg.Passive = false
		f.g.SetPeers([]Config{f.cfg})
		f.establish(f.accept(), theirs())
	})
}

// KEEPALIVEs are sent as often as configured, and not less often than in a third of the hold time.
func TestKeepalive(t *testing.T) {
	for _, row := range []struct{ hold, interval, want time.Duration }{
		{9 * time.Second, 100 * time.Millisecond, 100 * time.Millisecond}, {3 * time.Second, time.Minute, time.Second},
		{9 * time.Second, 0, 3 * time.Second},
	} {
		bubble(t, row.interval.String(), func(t *testing.T) {
			f := newFixture(t, func(_ *Options, c *Config) { c.HoldTime, c.Keepalive = row.hold, row.interval })
			l := f.accept()
			f.establish(l, theirs())
			start := time.Now()
			for n := range 4 { // the first one is that of the handshake
				if m, err := l.r.next(); err != nil || m.kind != typeKeepalive {
					t.Fatalf("message %d: %v, %v", n, m, err)
				}
				l.send(keepalive)
			}
			if took := time.Since(start); took != 3*row.want {
				t.Errorf("three KEEPALIVEs took %v, want %v", took, 3*row.want)
			}
		})
	}
}

// An attempt to connect with the old password, which gets no answer, ends when the password changes.
func TestDialWithTheNewPassword(t *testing.T) {
	t.Parallel()
	f := newTCPFixture(t, func(_ *Options, c *Config) { c.Passive = true })
	setRouterKey(t, f.router.(syscall.Conn), "new")
	f.cfg.Passive, f.cfg.Password, f.cfg.Retry = false, "old", time.Hour
	f.g.SetPeers([]Config{f.cfg})
	f.until("an attempt", func() bool { return slices.Contains(f.states, Connect) })
	f.cfg.Password = "new"
	f.g.SetPeers([]Config{f.cfg})
	f.establish(f.accept(), theirs())
	f.mu.Lock()
	defer f.mu.Unlock()
	if len(f.faults) > 0 {
		t.Errorf("faults %q", f.faults)
	}
}

// Retry is the mean time between two attempts to connect. The default is 2 s.
func TestRetry(t *testing.T) {
	for _, retry := range []time.Duration{0, 100 * time.Millisecond, time.Hour} {
		bubble(t, retry.String(), func(t *testing.T) {
			f := newFixture(t, func(_ *Options, c *Config) { c.Passive, c.Retry = true, retry })
			var attempts []time.Time
			f.g.dial = func(context.Context, *Config) (socket, error) {
				attempts = append(attempts, time.Now())
				return nil, syscall.ECONNREFUSED
			}
			f.cfg.Passive = false
			f.g.SetPeers([]Config{f.cfg})
			mean := cmp.Or(retry, dialRetry)
			time.Sleep(20 * mean)
			f.end()
			for i, at := range attempts[1:] {
				if pause := at.Sub(attempts[i]); pause < mean*3/4 || pause >= mean*5/4 {
					t.Errorf("attempt %d after %v, want about %v", i+1, pause, mean)
				}
			}
			if n := len(attempts); n < 16 || n > 27 {
				t.Errorf("%d attempts in the time of 20", n)
			}
		})
	}
}

// A message of a peer that panics is lost; the session goes on, with the messages after it.
func TestPanicOfAMessage(t *testing.T) {
	bubble(t, "established", func(t *testing.T) {
		var on atomic.Bool
		b := &lb.Boundary{Log: slog.New(slog.DiscardHandler), Before: func(part lb.Part, _ string) {
			if part == lb.PartPeer && on.CompareAndSwap(true, false) {
				panic("injected")
			}
		}}
		f := newFixture(t, func(o *Options, _ *Config) { o.Boundary = b })
		l := f.accept()
		f.establish(l, theirs())
		time.Sleep(time.Second)
		on.Store(true)
		l.send(raw(byte(typeUpdate), 23))
		time.Sleep(time.Second)
		l.send(keepalive)
		time.Sleep(time.Second)
		if n := b.Panics()[lb.PartPeer]; n != 1 {
			t.Errorf("%d panics; want 1", n)
		}
		d, established := f.g.Details(loopback)
		if !established || d.Received.All < 3 { // with the OPEN and the KEEPALIVE of the handshake
			t.Errorf("established %t, received %+v; want messages after the panic", established, d.Received)
		}
	})
}
