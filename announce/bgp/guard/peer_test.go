package guard

import (
	"net"
	"slices"
	"testing"
	"time"
)

// A passive guard does not connect, until it is passive no more.
func TestPassive(t *testing.T) {
	t.Parallel()
	f := newFixture(t, func(_ *Options, c *Config) { c.Passive = true })
	_ = f.router.SetDeadline(time.Now().Add(500 * time.Millisecond))
	if c, err := f.router.Accept(); err == nil {
		c.Close()
		t.Fatal("it connects")
	}
	_ = f.router.SetDeadline(time.Time{})
	f.cfg.Passive = false
	f.g.SetPeers([]Config{f.cfg})
	f.establish(f.accept(), theirs())
}

// KEEPALIVEs are sent as often as configured, and not less often than in a third of the hold time.
func TestKeepalive(t *testing.T) {
	for _, row := range []struct{ hold, interval, most time.Duration }{
		{9 * time.Second, 100 * time.Millisecond, 5 * time.Second}, {3 * time.Second, time.Minute, 20 * time.Second},
	} {
		t.Run(row.interval.String(), func(t *testing.T) {
			t.Parallel()
			f := newFixture(t, func(_ *Options, c *Config) { c.HoldTime, c.Keepalive = row.hold, row.interval })
			l := f.accept()
			f.establish(l, theirs())
			start := time.Now()
			for n := range 4 { // the first one is that of the handshake
				if m, err := l.r.next(); err != nil || m.kind != typeKeepalive {
					t.Fatalf("message %d: %v, %v", n, m, err)
				}
				if _, err := l.Write(keepalive); err != nil {
					t.Fatal(err)
				}
			}
			if took := time.Since(start); took > row.most {
				t.Errorf("three KEEPALIVEs took %v", took)
			}
		})
	}
}

// An attempt to connect with the old password, which gets no answer, ends when the password changes.
func TestDialWithTheNewPassword(t *testing.T) {
	t.Parallel()
	f := newFixture(t, func(_ *Options, c *Config) { c.Passive = true })
	setRouterKey(t, f.router, "new")
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

// Retry is the time between two attempts to connect, here to a router that starts after the first one.
func TestRetry(t *testing.T) {
	for _, row := range []struct {
		retry, within time.Duration // the default is 2 s
		again         bool
	}{{100 * time.Millisecond, 10 * time.Second, true}, {time.Hour, 3 * time.Second, false}} {
		t.Run(row.retry.String(), func(t *testing.T) {
			t.Parallel()
			f := newFixture(t, func(_ *Options, c *Config) { c.Passive = true })
			f.router.Close()
			f.cfg.Passive, f.cfg.Retry = false, row.retry
			f.g.SetPeers([]Config{f.cfg})
			f.until("a refused attempt", func() bool { return len(f.faults) > 0 })
			l, err := net.Listen("tcp4", f.router.Addr().String())
			if err != nil {
				t.Fatal(err)
			}
			defer l.Close()
			_ = l.(*net.TCPListener).SetDeadline(time.Now().Add(row.within))
			c, err := l.Accept()
			if err == nil {
				c.Close()
			}
			if again := err == nil; again != row.again {
				t.Errorf("connects again within %v: %t, want %t", row.within, again, row.again)
			}
		})
	}
}
