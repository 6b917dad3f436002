package guard

import (
	"bytes"
	"context"
	"errors"
	"io"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/steelyard-lb/steelyard/lb/lbtest/must"
)

// A message that a peer must not send ends the connection with the NOTIFICATION from RFC 4271, section 6, which is also
// the reported reason.
func TestProtocolErrors(t *testing.T) {
	valid := open(func(*Open) {})
	version := bytes.Clone(valid)
	version[headerLen] = 3
	update := encode(typeUpdate, make([]byte, 4))
	for _, row := range []struct {
		name          string
		send          [][]byte
		code, subcode uint8
		reason        string
	}{
		{"garbage", [][]byte{bytes.Repeat([]byte{1}, 40)}, 1, 1, "no marker"},
		{"length 65535", [][]byte{raw(1, 65535)[:50]}, 1, 2, "OPEN of 65535 bytes"},
		{"type 9", [][]byte{raw(9, 19)}, 1, 3, "unknown message type 9"},
		{"version", [][]byte{version}, 2, 1, "version 3"},
		{"AS", [][]byte{open(func(o *Open) { o.ASN = 64999 })}, 2, 2, "expected 64500, received 64999"},
		{"identifier", [][]byte{open(func(o *Open) { o.ID = netip.IPv4Unspecified() })}, 2, 3, "0.0.0.0"},
		{"hold time", [][]byte{open(func(o *Open) { o.HoldTime = 2 })}, 2, 6, "hold time of 2 s"},
		{"UPDATE first", [][]byte{update}, 5, 1, "UPDATE instead of OPEN"},
		{"KEEPALIVE first", [][]byte{keepalive}, 5, 1, "KEEPALIVE instead of OPEN"},
		{"UPDATE after OPEN", [][]byte{valid, update}, 5, 2, "UPDATE instead of KEEPALIVE"},
		{"second OPEN", [][]byte{valid, keepalive, valid}, 5, 3, "OPEN in an established session"},
		{"long KEEPALIVE", [][]byte{valid, keepalive, raw(4, 20)}, 1, 2, "KEEPALIVE of 20 bytes"},
	} {
		bubble(t, row.name, func(t *testing.T) {
			f := newFixture(t, nil)
			l := f.accept()
			l.want(typeOpen)
			l.send(row.send...)
			b := l.want(typeNotification)
			must.True(t, b[0] == row.code && b[1] == row.subcode,
				"NOTIFICATION %d/%d, want %d/%d", b[0], b[1], row.code, row.subcode)
			must.True(t, l.next() == nil, "a message after the NOTIFICATION")
			f.until("the reason", func() bool {
				return slices.ContainsFunc(f.faults, func(s string) bool { return strings.Contains(s, row.reason) })
			})
		})
	}
}

// The peer's NOTIFICATION is the reported reason, in every state.
func TestReceivedNotification(t *testing.T) {
	refusal := (&Error{Code: codeOpen, Subcode: 6}).message()
	for name, before := range map[string][][]byte{
		"opensent": {}, "openconfirm": {open(func(*Open) {})}, "established": {open(func(*Open) {}), keepalive},
	} {
		bubble(t, name, func(t *testing.T) {
			f := newFixture(t, nil)
			l := f.accept()
			l.want(typeOpen)
			l.send(append(before, refusal)...)
			f.until("the reason", func() bool {
				return slices.Contains(f.faults, "received NOTIFICATION: unacceptable hold time (code 2, subcode 6)")
			})
			m := l.next()
			must.True(t, m == nil, "%+v in answer to a NOTIFICATION", m)
		})
	}
}

// Nothing that a peer sends in a session reaches the backend: it receives an OPEN rebuilt from checked fields,
// KEEPALIVEs, and a single ROUTE-REFRESH for any number of them. The peer's routes are counted.
func TestNothingReachesTheBackend(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFixture(t, nil)
		l := f.accept()
		o := theirs()
		o.Hostname, o.GracefulRestart, o.RestartTime = "attacker", true, 77
		backend := f.establish(l, o)
		must.Get(backend.Write(encode(typeUpdate, []byte{0, 0, 0, 0, 24, 203, 0, 113})))(t)
		l.want(typeUpdate)
		for range 100 {
			l.send(
				encode(typeUpdate, []byte{0, 0, 0, 0, 24, 203, 0, 113, 8, 10}), // two routes
				encode(typeUpdate, []byte{0, 2, 8, 10, 0, 0}),                  // one withdrawn
				encode(typeUpdate, []byte{0xff, 0xff, 0xff, 0xff}),             // malformed
				encode(typeRouteRefresh, []byte{0, 1, 0, 1}), encode(typeRouteRefresh, []byte{0, 1, 0, 128}),
				encode(typeRouteRefresh, []byte{0, 1, 1, 1}), encode(typeRouteRefresh, []byte{0, 1, 0, 1, 99}),
			)
		}
		f.until("all is counted", func() bool {
			got, ok := f.g.Details(loopback)
			want := Received{Announced: 200, Withdrawn: 100, Malformed: 100}
			all := got.Received.All == 702 // including the handshake
			return ok && got.Routes == want && got.Received.Updates == 300 && all
		})
		clean := Open{
			ASN: 64500, HoldTime: backendHoldTime, ID: loopback, V4: true, V6: true, FourOctetAS: true,
			RouteRefresh: true, GracefulRestart: true,
		}
		want := slices.Concat(clean.message(), keepalive, encode(typeRouteRefresh, []byte{0, 1, 0, 1}))
		f.until("the ROUTE-REFRESH", func() bool { return len(f.received) >= len(want) })
		must.Equal(t, want, f.atBackend())
	})
}

// UPDATEs for families that the peer has not offered, and default routes, are not sent. Only peers with graceful
// restart receive End-of-RIB.
func TestOnlyNegotiatedFamilies(t *testing.T) {
	route4 := encode(typeUpdate, []byte{0, 0, 0, 0, 24, 203, 0, 113})
	route6 := encode(typeUpdate, []byte{0, 0, 0, 9, 0x80, 15, 6, 0, 2, 1, 16, 0x20, 1})
	end4, end6 := encode(typeUpdate, make([]byte, 4)), encode(typeUpdate, []byte{0, 0, 0, 6, 0x80, 15, 3, 0, 2, 1})
	defaultRoute := encode(typeUpdate, []byte{0, 0, 0, 0, 0})
	default6 := encode(typeUpdate, slices.Concat([]byte{0, 0, 0, 25, 0x80, 14, 22, 0, 2, 1, 16}, make([]byte, 18)))
	all := [][]byte{route6, end6, defaultRoute, default6, route4, end4}
	for _, row := range []struct {
		name     string
		peer     func(*Open)
		expected [][]byte
	}{
		{"both", func(o *Open) { o.GracefulRestart = true }, [][]byte{route6, end6, route4, end4}},
		{"both, no graceful restart", func(*Open) {}, [][]byte{route6, route4}},
		{"IPv4", func(o *Open) { o.V6, o.GracefulRestart = false, true }, [][]byte{route4, end4}},
		{"IPv6", func(o *Open) { o.V4, o.GracefulRestart = false, true }, [][]byte{route6, end6}},
	} {
		bubble(t, row.name, func(t *testing.T) {
			f := newFixture(t, nil)
			l, o := f.accept(), theirs()
			row.peer(&o)
			backend := f.establish(l, o)
			must.Get(backend.Write(bytes.Join(all, nil)))(t)
			for i, want := range row.expected {
				must.Row(t, i, want[headerLen:], l.want(typeUpdate))
			}
			f.until("all are handled", func() bool { return len(f.sent) == 3 })
			f.end()
			b := l.want(typeNotification)
			must.True(t, b[0] == codeCease && b[1] == ceaseShutdown, "NOTIFICATION %v", b)
		})
	}
}

// When the backend ends the session, the peer receives its last UPDATEs before the NOTIFICATION.
func TestBackendEndsTheSession(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFixture(t, nil)
		l := f.accept()
		backend := f.establish(l, theirs())
		withdrawal := encode(typeUpdate, []byte{0, 4, 24, 203, 0, 113, 0, 0})
		must.Get(backend.Write(slices.Concat(withdrawal, cease(ceaseShutdown, "bye").message())))(t)
		got := l.want(typeUpdate)
		must.True(t, bytes.Equal(got, withdrawal[headerLen:]), "UPDATE %x", got)
		got = l.want(typeNotification)
		must.True(t, string(got) == "\x06\x02\x03bye", "NOTIFICATION %q", got)
	})
}

// The lower hold time applies. A peer that stays silent for that time receives a NOTIFICATION. Without a hold time it
// may stay silent, and receives no KEEPALIVEs.
func TestHoldTime(t *testing.T) {
	for _, row := range []struct {
		ours, theirs uint16
		expires      bool
	}{{9, 3, true}, {3, 9, true}, {0, 3, false}, {3, 0, false}} {
		bubble(t, "", func(t *testing.T) {
			f := newFixture(t, func(_ *Options, c *Config) { c.HoldTime = time.Duration(row.ours) * time.Second })
			l, o := f.accept(), theirs()
			o.HoldTime = row.theirs
			f.establish(l, o)
			if m, err := l.r.next(); err != nil || m.kind != typeKeepalive { // the handshake's
				t.Fatalf("%v, %v", m.kind, err)
			}
			_ = l.SetDeadline(time.Now().Add(5 * time.Second))
			keepalives, code := 0, uint8(0)
			for {
				m, err := l.r.next()
				if err != nil {
					break
				}
				if m.kind == typeKeepalive {
					keepalives++
				} else {
					code = m.body()[0]
				}
			}
			must.True(t, (code == codeHoldTimer) == row.expires && keepalives > 0 == row.expires,
				"%+v: NOTIFICATION code %d, %d KEEPALIVEs", row, code, keepalives)
		})
	}
}

// The end of a session is reported with its NOTIFICATION, even if the peer is lost and closes nothing: when the hold
// time expires or BFD reports a failure.
func TestLostPeerIsReportedAtOnce(t *testing.T) {
	for reason, end := range map[string]func(*fixture){
		"no message from the peer": func(*fixture) {},
		"as BFD says":              func(f *fixture) { f.g.Reset(loopback, "as BFD says") },
	} {
		bubble(t, reason, func(t *testing.T) {
			f := newFixture(t, func(_ *Options, c *Config) { c.HoldTime = 3 * time.Second })
			l := f.accept()
			f.establish(l, theirs())
			end(f)
			l.want(typeNotification)
			synctest.Wait()
			f.mu.Lock()
			defer f.mu.Unlock()
			must.True(t, slices.ContainsFunc(f.faults, func(s string) bool { return strings.Contains(s, reason) }),
				"reported after the NOTIFICATION: %q", f.faults)
		})
	}
}

// A BFD failure does not end a session established after BFD was last up.
func TestFailed(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		before := time.Now()
		time.Sleep(time.Second)
		f := newFixture(t, nil)
		l := f.accept()
		f.establish(l, theirs())
		f.g.Failed(loopback, time.Time{}, "never up")
		f.g.Failed(loopback, before, "up before")
		f.g.Failed(loopback, time.Now(), "up since")
		b := l.want(typeNotification)
		must.True(t, b[0] == codeCease && b[1] == ceaseBFD, "NOTIFICATION %d/%d", b[0], b[1])
		f.until("the reason", func() bool { return len(f.faults) > 0 && strings.Contains(f.faults[0], "up since") })
	})
}

// A peer that accepts no data is lost after the hold time, even if it sends KEEPALIVEs (RFC 9687). The writers wait for
// a mutex, which would stop a bubble's clock.
func TestPeerThatDoesNotRead(t *testing.T) {
	t.Parallel()
	f := newTCPFixture(t, func(_ *Options, c *Config) { c.HoldTime = 3 * time.Second })
	l := f.accept()
	backend := f.establish(l, theirs())
	go func() {
		for l.SetDeadline(time.Now().Add(time.Minute)) == nil {
			if _, err := l.Write(keepalive); err != nil {
				return
			}
			time.Sleep(500 * time.Millisecond)
		}
	}()
	go func() {
		routes := encode(typeUpdate, append(make([]byte, 4), bytes.Repeat([]byte{24, 203, 0, 113}, 1000)...))
		for {
			if _, err := backend.Write(routes); err != nil {
				return
			}
		}
	}()
	f.until("the reason", func() bool {
		return slices.ContainsFunc(f.faults, func(s string) bool { return strings.Contains(s, "accepted no data") })
	})
}

// A guard that stops without a cause closes connections without a NOTIFICATION, so peers with graceful restart keep the
// routes.
func TestStopWithoutNotification(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFixture(t, nil)
		l := f.accept()
		f.establish(l, theirs())
		f.stop(errors.New("restart"))
		<-f.done
		must.True(t, l.next() == nil, "a message")
		_, err := l.r.next()
		must.True(t, errors.Is(err, io.EOF), "the connection ended with %v", err)
	})
}

// registry counts the functions that wait until a context ends.
type registry struct {
	context.Context
	done    chan struct{}
	waiting int
}

func (r *registry) Done() <-chan struct{} { return r.done }

func (r *registry) AfterFunc(func()) (stop func() bool) {
	r.waiting++
	return func() bool { r.waiting--; return true }
}

// A route refresh leaves nothing behind until the session ends, which may take years.
func TestRefreshesLeaveNothing(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ctx := &registry{Context: t.Context(), done: make(chan struct{})}
		c := &conn{theirs: &Open{V4: true}}
		var at [3]time.Time
		for range 100 {
			c.refresh(ctx, []byte{0, afiIPv4, 0, safiUnicast}, &at)
			time.Sleep(refreshInterval / 2)
		}
		must.True(t, ctx.waiting == 0, "%d functions wait for the end of the session", ctx.waiting)
	})
}
