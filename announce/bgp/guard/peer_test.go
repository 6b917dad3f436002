package guard

import (
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
