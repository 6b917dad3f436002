package l2

import (
	"context"
	"log/slog"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/vishvananda/netlink"

	"github.com/steelyard-lb/steelyard/lb"
)

const (
	// linkBuffer is the size of the kernel's queue of link updates, in bytes. If it overflows, updates are lost.
	linkBuffer = 4 << 20
	// linkRetry is how long the watcher waits to subscribe again after an overrun or an error.
	linkRetry = 100 * time.Millisecond
)

// linkWatcher notifies responders that their interfaces may have changed. After an overrun it notifies all of them,
// because any update may be lost.
type linkWatcher struct {
	responders []*responder
	changes    []chan struct{} // one per responder
	overruns   prometheus.Counter
	log        *slog.Logger
	buffer     int
	boundary   *lb.Boundary // wraps the handling of each update
	received   func()       // called for each update, for tests; may be nil
}

func newLinkWatcher(responders []*responder, overruns prometheus.Counter, log *slog.Logger) *linkWatcher {
	w := &linkWatcher{responders: responders, overruns: overruns, log: log, buffer: linkBuffer}
	for range responders {
		w.changes = append(w.changes, make(chan struct{}, 1))
	}
	return w
}

func (w *linkWatcher) run(ctx context.Context) {
	for logged := ""; ; {
		err := w.follow(ctx)
		if ctx.Err() != nil {
			return
		}
		text := "the queue of updates was full"
		if err != nil {
			text = err.Error()
		} else {
			w.overruns.Inc()
		}
		if text != logged {
			w.log.Warn("link updates lost; checking every interface again", "reason", text)
			logged = text
		}
		select {
		case <-ctx.Done():
			return
		case <-time.After(linkRetry):
		}
	}
}

// follow subscribes to link updates, and returns when ctx ends or the subscription fails.
func (w *linkWatcher) follow(ctx context.Context) error {
	updates, done := make(chan netlink.LinkUpdate, 64), make(chan struct{})
	end := sync.OnceFunc(func() { close(done) }) // closes the socket
	defer end()
	defer context.AfterFunc(ctx, end)()
	err := netlink.LinkSubscribeWithOptions(updates, done, netlink.LinkSubscribeOptions{
		ErrorCallback:     func(err error) { w.log.Debug("netlink", "err", err) },
		ReceiveBufferSize: w.buffer, ReceiveBufferForceSize: true,
	})
	if err != nil {
		return err
	}
	for _, c := range w.changes { // for changes before this subscription
		signal(c)
	}
	for u := range updates {
		if w.received != nil {
			w.received()
		}
		w.boundary.Do(lb.PartNetlink, "l2", func() { notify(u, w.responders, w.changes) })
	}
	return nil
}

// notify notifies the responders whose interface an update is about. That is the interface with the configured name, or
// the open one, which may have been renamed.
func notify(u netlink.LinkUpdate, responders []*responder, changes []chan struct{}) {
	for i, p := range responders {
		if u.Link == nil {
			continue
		}
		if s := p.opened(); u.Attrs().Name == p.name || s != nil && s.ifi.Index == u.Attrs().Index {
			signal(changes[i])
		}
	}
}

func signal(c chan<- struct{}) {
	select {
	case c <- struct{}{}:
	default:
	}
}
