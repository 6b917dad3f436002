package guard

import (
	"log/slog"
	"sync/atomic"
	"testing"
	"time"

	"github.com/steelyard-lb/steelyard/lb"
)

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
