package agent

import (
	"context"
	"log/slog"
	"net"
	"time"
)

// dialInterval is the delay between two attempts to connect to the API server, dialTimeout the bound of one attempt.
const (
	dialInterval = 500 * time.Millisecond
	dialTimeout  = 5 * time.Second
)

// retryingDial returns a dial function that retries until it is connected or its context ends. The Kubernetes client
// backs off after each failure, and reconnects a watch up to a minute after the API server is back; with this dial it
// does so within dialInterval.
func retryingDial(log *slog.Logger) func(ctx context.Context, network, address string) (net.Conn, error) {
	return func(ctx context.Context, network, address string) (net.Conn, error) {
		d := net.Dialer{Timeout: dialTimeout, KeepAlive: 30 * time.Second}
		for since := (time.Time{}); ; {
			conn, err := d.DialContext(ctx, network, address)
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
