package l2

import (
	"context"
	"fmt"
	"log/slog"

	"github.com/vishvananda/netlink"
)

// watchLinks returns a channel per responder that receives when its interface may have changed.
func watchLinks(
	ctx context.Context, responders []*responder, log *slog.Logger,
) (changes []chan struct{}, stop func(), err error) {
	updates, done := make(chan netlink.LinkUpdate, 64), make(chan struct{})
	err = netlink.LinkSubscribeWithOptions(updates, done, netlink.LinkSubscribeOptions{
		ErrorCallback: func(err error) { log.Debug("netlink", "err", err) },
	})
	if err != nil {
		return nil, nil, fmt.Errorf("subscribe to link updates: %w", err)
	}
	for range responders {
		changes = append(changes, make(chan struct{}, 1))
	}
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		for u := range updates { // closed after done
			notify(u, responders, changes)
		}
	}()
	return changes, func() { close(done); <-ended }, nil
}

// notify sends to the channel of each responder whose interface the update is about, unless it is full.
func notify(u netlink.LinkUpdate, responders []*responder, changes []chan struct{}) {
	for i, p := range responders {
		if u.Link == nil || u.Attrs().Name != p.name {
			continue
		}
		select {
		case changes[i] <- struct{}{}:
		default:
		}
	}
}
