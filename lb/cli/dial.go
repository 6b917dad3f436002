package cli

import (
	"context"
	"log/slog"
	"net"
	"time"
)

// dialAgain is when an API server that was not reached is tried again, and dialLimit how long one try may take.
const (
	dialAgain = 500 * time.Millisecond
	dialLimit = 5 * time.Second
)

// patientDial returns a dial function that does not fail while the other end is away. Watches of the Kubernetes client go on as
// soon as it is back: with failures they would wait longer each time, and after an outage for up to a minute.
func patientDial(log *slog.Logger) func(ctx context.Context, network, address string) (net.Conn, error) {
	return func(ctx context.Context, network, address string) (net.Conn, error) {
		d := net.Dialer{Timeout: dialLimit, KeepAlive: 30 * time.Second}
		for away := (time.Time{}); ; {
			conn, err := d.DialContext(ctx, network, address)
			switch {
			case err == nil && !away.IsZero():
				log.Info("API server reached again", "address", address, "away", time.Since(away).Round(time.Millisecond))
				return conn, nil
			case err == nil:
				return conn, nil
			case away.IsZero():
				log.Warn("API server not reached; what it last said stays in force", "address", address, "err", err)
				away = time.Now()
			}
			select {
			case <-ctx.Done():
				return nil, err
			case <-time.After(dialAgain):
			}
		}
	}
}
