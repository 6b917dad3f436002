package agent

import (
	"context"
	"errors"
	"log/slog"
	"net"
	"sync/atomic"
	"time"
)

// dialInterval is the delay between two attempts to connect to the API server, dialTimeout the bound of one attempt.
const (
	dialInterval = 500 * time.Millisecond
	dialTimeout  = 5 * time.Second
)

// reachability is whether the API server accepts connections. The zero value is for one that has not been tried.
type reachability struct{ away atomic.Pointer[time.Time] }

// dialed records the result of an attempt to connect.
func (r *reachability) dialed(err error) {
	if err == nil {
		r.away.Store(nil)
	} else if now := time.Now(); !errors.Is(err, context.Canceled) {
		r.away.CompareAndSwap(nil, &now)
	}
}

// awaySince returns since when the API server accepts no connection; zero: it does.
func (r *reachability) awaySince() time.Time {
	if at := r.away.Load(); at != nil {
		return *at
	}
	return time.Time{}
}

// retryingDial returns a dial function that retries until it is connected or its context ends. The Kubernetes client
// backs off after each failure, and reconnects a watch up to a minute after the API server is back; with this dial it
// does so within dialInterval.
func retryingDial(
	log *slog.Logger, r *reachability,
) func(ctx context.Context, network, address string) (net.Conn, error) {
	return func(ctx context.Context, network, address string) (net.Conn, error) {
		d := net.Dialer{Timeout: dialTimeout, KeepAlive: 30 * time.Second}
		for since := (time.Time{}); ; {
			conn, err := d.DialContext(ctx, network, address)
			r.dialed(err)
			switch {
			case err == nil && !since.IsZero():
				took := time.Since(since).Round(time.Millisecond)
				log.Info("API server reachable again", "address", address, "took", took)
				return conn, nil
			case err == nil:
				return conn, nil
			case since.IsZero():
				log.Warn("API server unreachable; its last known state stays in force", "address", address, "err", err)
				since = time.Now()
			}
			select {
			case <-ctx.Done():
				return nil, err
			case <-time.After(dialInterval):
			}
		}
	}
}
