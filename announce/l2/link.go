package l2

import (
	"context"
	"fmt"
	"log/slog"

	"github.com/vishvananda/netlink"
)

// watchLinks returns, for each port, a channel that has something when its interface may have changed.
func watchLinks(ctx context.Context, ports []*port, log *slog.Logger) (changes []chan struct{}, stop func(), err error) {
	updates, done := make(chan netlink.LinkUpdate, 64), make(chan struct{})
	err = netlink.LinkSubscribeWithOptions(updates, done, netlink.LinkSubscribeOptions{
		ErrorCallback: func(err error) { log.Debug("netlink", "err", err) },
	})
	if err != nil {
		return nil, nil, fmt.Errorf("watch the interfaces: %w", err)
	}
	for range ports {
		changes = append(changes, make(chan struct{}, 1))
	}
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		for u := range updates { // closed once done is
			for i, p := range ports {
				if u.Link == nil || u.Attrs().Name != p.name {
					continue
				}
				select {
				case changes[i] <- struct{}{}:
				default:
				}
			}
		}
	}()
	return changes, func() { close(done); <-ended }, nil
}
