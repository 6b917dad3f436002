package guard

import (
	"bytes"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	"github.com/steelyard-lb/steelyard/lb/lbtest/must"
)

// Each message is parsed or rejected, and no parser panics.
func FuzzMessages(f *testing.F) {
	o := theirs()
	f.Add(slices.Concat(o.message(), keepalive, encode(typeUpdate, []byte{0, 0, 0, 0, 24, 203, 0, 113})))
	f.Add(slices.Concat(encode(typeUpdate, []byte{0, 0, 0, 6, 0x80, 15, 3, 0, 2, 1}), cease(2, "bye").message()))
	f.Add(encode(typeRouteRefresh, []byte{0, 1, 0, 1}))
	f.Fuzz(func(t *testing.T, b []byte) {
		r := newMessageReader(bytes.NewReader(b))
		var u Update
		for {
			m, err := r.next()
			if err != nil {
				return
			}
			must.Need(t, len(m.raw) >= headerLen && len(m.raw) <= maxMessage && m.kind.validLength(len(m.raw)),
				"message %x", m.raw)
			switch m.kind {
			case typeOpen:
				_, _ = parseOpen(m.body())
			case typeUpdate:
				_ = parseUpdate(m.body(), &u)
			case typeNotification:
				_ = parseNotification(m.body()).Error()
			}
		}
	})
}

// An accepted OPEN can be encoded, which preserves it.
func FuzzOpen(f *testing.F) {
	o := theirs()
	f.Add(o.message()[headerLen:])
	f.Add(body(2, 6, 1, 4, 0, 2, 0, 1))
	f.Fuzz(func(t *testing.T, b []byte) {
		if len(b) < 10 || len(b) > maxMessage-headerLen {
			return
		}
		o, err := parseOpen(b)
		if err != nil || !o.V4 && !o.V6 {
			return
		}
		must.Need(t, o.FourOctetAS || o.ASN <= 0xffff, "%+v", o)
		again, err := parseOpen(o.message()[headerLen:])
		must.Need(t, err == nil && *again == *o, "%+v became %+v, %v", o, again, err)
	})
}

// Whatever a router sends, the backend receives only messages that the guard has created.
func FuzzSession(f *testing.F) {
	o := theirs()
	session := slices.Concat(o.message(), keepalive)
	f.Add(session)
	f.Add(slices.Concat(session, encode(typeUpdate, []byte{0, 0, 0, 0, 24, 203, 0, 113}), keepalive))
	f.Add(slices.Concat(session, encode(typeRouteRefresh, []byte{0, 1, 0, 1}), keepalive))
	f.Add(slices.Concat(session, cease(2, "bye").message()))
	o.GracefulRestart, o.RestartTime, o.V6 = true, 120, false
	f.Add(slices.Concat(o.message(), keepalive, encode(typeUpdate, make([]byte, 4))))
	f.Fuzz(func(t *testing.T, b []byte) {
		synctest.Test(t, func(t *testing.T) {
			x := newFixture(t, nil)
			l := x.accept()
			read := make(chan struct{})
			go func() {
				defer close(read)
				for l.next() != nil {
				}
			}()
			_, _ = l.Write(b) // fails if the guard has already closed the connection
			synctest.Wait()   // the guard has closed the connection, or waits for more
			l.Close()
			<-read
			x.end()
			x.mu.Lock()
			defer x.mu.Unlock()
			checkBackend(t, x.received)
		})
	})
}

// checkBackend checks what the backend has received in all sessions.
func checkBackend(t *testing.T, b []byte) {
	t.Helper()
	r := newMessageReader(bytes.NewReader(b))
	for {
		m, err := r.next()
		if err != nil {
			return
		}
		switch m.kind {
		case typeKeepalive:
		case typeRouteRefresh:
			b := m.body()
			must.True(t, len(b) == 4 && b[0] == 0 && b[1] >= 1 && b[1] <= 2 && b[2] == 0 && b[3] == safiUnicast,
				"ROUTE-REFRESH %x", b)
		case typeOpen:
			o, err := parseOpen(m.body())
			must.True(t, err == nil && o.ASN == 64500 && o.HoldTime == backendHoldTime &&
				bytes.Equal(o.message(), m.raw), "OPEN %+v, %v", o, err)
		default:
			t.Errorf("unexpected %v %x", m.kind, m.body())
		}
	}
}

// A guard stops immediately, whatever state its peer is in.
func TestEndsInEveryState(t *testing.T) {
	valid := open(func(*Open) {})
	for name, send := range map[string][][]byte{
		"opensent": nil, "openconfirm": {valid}, "established": {valid, keepalive},
		"half a message": {valid, keepalive, valid[:25]},
	} {
		bubble(t, name, func(t *testing.T) {
			f := newFixture(t, nil)
			l := f.accept()
			l.want(typeOpen)
			l.send(send...)
			f.until("connected", func() bool { return slices.Contains(f.states, OpenSent) })
			began := time.Now()
			f.stop(Stopped("bye"))
			b := l.want(typeNotification)
			must.True(t, string(b) == "\x06\x02\x03bye", "NOTIFICATION %q", b)
			l.Close()
			<-f.done
			took := time.Since(began)
			must.True(t, took == 0, "stopped after %v", took)
		})
	}
}
