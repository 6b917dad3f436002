package guard

import (
	"cmp"
	"context"
	"log/slog"
	"net/netip"
	"slices"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/steelyard-lb/steelyard/lb"
	"github.com/steelyard-lb/steelyard/lb/lbtest/must"
)

// setRouterKey sets the key for the guard's connections on a router's socket.
func setRouterKey(t *testing.T, c syscall.Conn, password string) {
	t.Helper()
	raw, err := c.SyscallConn()
	if err == nil {
		cfg := Config{Address: loopback, Password: password}
		err = control(raw, func(fd int) error { return setKey(fd, &cfg) })
	}
	must.Do(t, err)
}

// Changing the password on both sides does not end the session, and the next session uses it.
func TestPasswordRotation(t *testing.T) {
	t.Parallel()
	f := newTCPFixture(t, func(_ *Options, c *Config) { c.Passive = true })
	with := f.cfg
	with.Passive, with.Password = false, "old"
	setRouterKey(t, f.router.(syscall.Conn), "old")
	f.g.SetPeers([]Config{with})
	l := f.accept()
	backend := f.establish(l, theirs())
	setRouterKey(t, f.router.(syscall.Conn), "new")
	setRouterKey(t, l.Conn.(syscall.Conn), "new")
	with.Password = "new"
	f.g.SetPeers([]Config{with})
	route := encode(typeUpdate, []byte{0, 0, 0, 0, 24, 203, 0, 113})
	must.Get(backend.Write(route))(t)
	l.want(typeUpdate)
	f.mu.Lock()
	must.True(t, len(f.faults) == 0, "faults %q", f.faults)
	f.mu.Unlock()
	l.Close()
	f.establish(f.accept(), theirs())
}

// A router may receive a new password before it has lost the session, and then reconnects with it. The new connection
// replaces the session, on which nothing arrives anymore. Without a password, any process at the router's address could
// do this.
func TestNewConnectionReplacesTheSession(t *testing.T) {
	route := encode(typeUpdate, []byte{0, 0, 0, 0, 24, 203, 0, 113})
	for _, row := range []struct {
		name, before, password string
		age                    time.Duration
		replaces               bool
	}{
		{"new password", "old", "new", flapThreshold, true}, {"young session", "old", "old", 0, false},
		{"no password", "", "", flapThreshold, false},
	} {
		bubble(t, row.name, func(t *testing.T) {
			f := newFixture(t, func(_ *Options, c *Config) { c.Password, c.HoldTime = row.before, time.Minute })
			with := f.cfg
			before := f.accept()
			backend := f.establish(before, theirs())
			time.Sleep(row.age)
			with.Password = row.password
			f.g.SetPeers([]Config{with})

			after := f.connect()
			if row.replaces {
				backend = f.establish(after, theirs())
				must.Get(backend.Write(route))(t)
				after.want(typeUpdate)
				f.until("the reason", func() bool { return slices.Contains(f.faults, errReplaced.Error()) })
				return
			}
			after.want(typeOpen)
			after.send(open(func(*Open) {}), keepalive)
			b := after.want(typeNotification)
			must.True(t, b[0] == codeCease && b[1] == ceaseCollision, "NOTIFICATION %v", b)
			must.Get(backend.Write(route))(t)
			before.want(typeUpdate)
		})
	}
}

// A change that needs another connection ends the session with a NOTIFICATION, or without one if graceful restart keeps
// the routes. Other changes do not end it.
func TestSetPeers(t *testing.T) {
	for _, row := range []struct {
		name   string
		start  func(*Config)
		change func(*Config)
		code   byte // of the CEASE; 0 for none
		stays  bool
	}{
		{"nothing", func(*Config) {}, func(*Config) {}, 0, true},
		{"TTL", func(c *Config) { c.TTL = 1 }, func(c *Config) { c.TTL = 2 }, 0, true},
		{"lowest TTL", func(c *Config) { c.TTL, c.MinTTL = 64, 2 }, func(c *Config) { c.MinTTL = 3 }, 0, true},
		{"restart time", func(c *Config) { c.RestartTime = 30 * time.Second },
			func(c *Config) { c.RestartTime = time.Minute }, 0, true},
		{"hold time", func(*Config) {}, func(c *Config) { c.HoldTime = time.Minute }, ceaseChanged, false},
		{"hold time, graceful restart", func(c *Config) { c.RestartTime = 30 * time.Second },
			func(c *Config) { c.HoldTime = time.Minute }, 0, false},
		{"source in use", func(*Config) {}, func(c *Config) { c.Source = sourceInUse }, 0, true},
		{"another source", func(*Config) {}, func(c *Config) { c.Source = netip.MustParseAddr("192.0.2.99") },
			ceaseChanged, false},
		{"device", func(*Config) {}, func(c *Config) { c.Device = "lo" }, ceaseChanged, false},
		{"graceful restart off", func(c *Config) { c.RestartTime = 30 * time.Second },
			func(c *Config) { c.RestartTime = 0 }, ceaseChanged, false},
		{"removed", func(*Config) {}, nil, ceaseDeconfigured, false},
	} {
		bubble(t, row.name, func(t *testing.T) {
			f := newFixture(t, func(_ *Options, c *Config) { row.start(c) })
			l, o := f.accept(), theirs()
			o.GracefulRestart = true
			backend := f.establish(l, o)
			f.until("established", func() bool { return f.states[len(f.states)-1] == Established })
			list := []Config{f.cfg}
			if row.change == nil {
				list = nil
			} else {
				row.change(&list[0])
			}
			f.g.SetPeers(list)
			f.g.SetPeers(list)
			if row.stays {
				must.Get(backend.Write(encode(typeUpdate, []byte{0, 0, 0, 0, 24, 203, 0, 113})))(t)
				l.want(typeUpdate)
				return
			}
			if row.code == 0 {
				if m := l.next(); m != nil {
					t.Errorf("unexpected %v %x", m.kind, m.body())
				}
			} else if b := l.want(typeNotification); b[0] != codeCease || b[1] != row.code {
				t.Errorf("NOTIFICATION %v; want code %d, subcode %d", b, codeCease, row.code)
			}
			f.until("a reason", func() bool {
				return slices.ContainsFunc(f.faults, func(s string) bool {
					return strings.Contains(s, "the peer was removed") || strings.Contains(s, "configuration changed")
				})
			})
			if row.change != nil {
				f.establish(f.accept(), o)
			}
		})
	}
}

func TestEndpoints(t *testing.T) {
	addr := netip.MustParseAddr
	v4, other4, v6 := addr("192.0.2.1"), addr("192.0.2.5"), addr("2001:db8::1")
	for _, row := range []struct {
		name  string
		port  int
		on    []netip.Addr
		peers []Config
		want  string
	}{
		{"no peers", 179, nil, nil, ""},
		{"IPv4 peers", 179, nil, []Config{{Address: v4}, {Address: other4}}, "0.0.0.0:179 "},
		{"IPv6 peer", 179, nil, []Config{{Address: v6}}, "[::]:179 "},
		{"both", 1790, nil, []Config{{Address: v6}, {Address: v4}, {Address: other4}}, "[::]:1790 0.0.0.0:1790 "},
		{"only connect", -1, nil, []Config{{Address: v4}}, ""},
		{"configured", 179, []netip.Addr{other4}, []Config{{Address: v4}, {Address: v6}}, "192.0.2.5:179 "},
		{"devices", 179, nil, []Config{{Address: v4, Device: "eth0"}, {Address: v6, Device: "red"}},
			"0.0.0.0:179 [::]:179%red "},
	} {
		g := New(Options{ListenPort: row.port, ListenAddresses: row.on})
		g.own = map[string]int{"red": 7}
		got := ""
		for _, at := range g.endpoints(row.peers) {
			got += at.String()
			if at.Device != "" {
				got += "%" + at.Device
			}
			got += " "
		}
		must.Row(t, row.name, row.want, got)
	}
}

// A passive guard does not connect until it is no longer passive.
func TestPassive(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFixture(t, func(_ *Options, c *Config) { c.Passive = true })
		time.Sleep(time.Hour)
		must.Need(t, len(f.outer) == 0, "it connects")
		f.cfg.Passive = false
		f.g.SetPeers([]Config{f.cfg})
		f.establish(f.accept(), theirs())
	})
}

// KEEPALIVEs are sent as often as configured, but at least three times per hold time.
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
			for n := range 4 { // the first one belongs to the handshake
				m, err := l.r.next()
				must.Need(t, err == nil && m.kind == typeKeepalive, "message %d: %v, %v", n, m, err)
				l.send(keepalive)
			}
			must.Row(t, "three KEEPALIVEs took", 3*row.want, time.Since(start))
		})
	}
}

// A new password cancels an attempt to connect with the old one, which gets no response.
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
	must.True(t, len(f.faults) == 0, "faults %q", f.faults)
}

// Retry is the mean time between attempts to connect. The default is 2 s.
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
				pause := at.Sub(attempts[i])
				must.True(t, pause >= mean*3/4 && pause < mean*5/4, "%d: after %v, want about %v", i+1, pause, mean)
			}
			n := len(attempts)
			must.True(t, n >= 16 && n <= 27, "%d attempts in the time of 20", n)
		})
	}
}

// A message whose handling panics is lost; the session continues with the next one.
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
		must.Row(t, "panics", 1, b.Panics()[lb.PartPeer])
		d, established := f.g.Details(loopback)
		if !established || d.Received.All < 3 { // including the handshake's OPEN and KEEPALIVE
			t.Errorf("established %t, received %+v; want messages after the panic", established, d.Received)
		}
	})
}
