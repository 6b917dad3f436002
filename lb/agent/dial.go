package agent

import (
	"context"
	"errors"
	"log/slog"
	"math/rand/v2"
	"net"
	"strings"
	"sync/atomic"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// dialInterval is the delay between two attempts to connect to the API server. dialTimeout bounds one attempt.
const (
	dialInterval = 500 * time.Millisecond
	dialTimeout  = 5 * time.Second
)

// reachability says whether the API server accepts connections. The zero value means that it has not been tried.
type reachability struct {
	away atomic.Pointer[time.Time]
	// returned is called when the API server accepts a connection again, before it is used. It may be nil.
	returned func(awaySince time.Time)
}

// dialed records the result of an attempt to connect, which began at start.
func (r *reachability) dialed(start time.Time, err error) {
	if err != nil && !errors.Is(err, context.Canceled) {
		r.away.CompareAndSwap(nil, &start)
	} else if err == nil {
		if since := r.away.Swap(nil); since != nil && r.returned != nil {
			r.returned(*since)
		}
	}
}

// awaySince returns when the API server stopped accepting connections, or zero if it accepts them.
func (r *reachability) awaySince() time.Time {
	if at := r.away.Load(); at != nil {
		return *at
	}
	return time.Time{}
}

// lostAfter is how long the API server may leave data, or the probes of an idle connection, unacknowledged; probes
// begin after probeIdle. The server's address may be a VIP that the nodes announce. If a router moves the connection to
// another node, which does not know it, nothing answers. The client itself would notice after 45 seconds.
const (
	lostAfter = 10 * time.Second
	probeIdle = 5 * time.Second
)

// apiDialer connects to the API server. If the server's address is a VIP that this node knows and that does not answer,
// apiDialer connects to an endpoint of that service. A node cannot reach a VIP through itself (source_is_local), and it
// may be the only node, or the one that the router chooses. TLS verifies the same name either way. A nil apiDialer
// knows no endpoints.
type apiDialer struct {
	// servers are dialed instead of the client's address, which may be a ClusterIP that this agent serves itself.
	servers []string
	// endpoints returns the endpoints of an address's VIP and port, or nil if it knows none.
	endpoints atomic.Pointer[func(address string) []string]
}

// directTimeout bounds an attempt to connect when there is an alternative.
const directTimeout = time.Second

func (a *apiDialer) dial(ctx context.Context, network, address string) (net.Conn, error) {
	var direct []string
	if a != nil && len(a.servers) > 0 {
		return dialAny(ctx, network, a.servers)
	}
	if a != nil {
		if f := a.endpoints.Load(); f != nil {
			direct = (*f)(address)
		}
	}
	if len(direct) == 0 {
		return dialAPI(ctx, network, address, dialTimeout)
	}
	conn, err := dialAPI(ctx, network, address, directTimeout)
	if err != nil && ctx.Err() == nil {
		if conn, failed := dialAny(ctx, network, direct); failed == nil {
			return conn, nil
		}
	}
	return conn, err
}

// dialAny connects to the first of the servers that accepts, in a random order.
func dialAny(ctx context.Context, network string, servers []string) (conn net.Conn, err error) {
	for _, i := range rand.Perm(len(servers)) {
		if conn, err = dialAPI(ctx, network, servers[i], directTimeout); err == nil || ctx.Err() != nil {
			break
		}
	}
	return conn, err
}

// dialAPI opens a connection that fails when the server leaves it unacknowledged for lostAfter.
func dialAPI(ctx context.Context, network, address string, timeout time.Duration) (net.Conn, error) {
	d := net.Dialer{
		Timeout: timeout,
		KeepAliveConfig: net.KeepAliveConfig{
			Enable: true, Idle: probeIdle, Interval: time.Second, Count: int((lostAfter - probeIdle) / time.Second),
		},
		Control: func(network, _ string, raw syscall.RawConn) (err error) {
			if !strings.HasPrefix(network, "tcp") {
				return nil
			}
			outer := raw.Control(func(fd uintptr) {
				ms := int(lostAfter / time.Millisecond)
				err = unix.SetsockoptInt(int(fd), unix.IPPROTO_TCP, unix.TCP_USER_TIMEOUT, ms)
			})
			return errors.Join(outer, err)
		},
	}
	return d.DialContext(ctx, network, address)
}

// retryingDial returns a dial function that retries until it connects or its context ends. The Kubernetes client backs
// off after each failure, so it can take up to a minute to reconnect a watch after the API server returns; with this
// dial it takes at most dialInterval.
func retryingDial(
	log *slog.Logger, r *reachability, a *apiDialer,
) func(ctx context.Context, network, address string) (net.Conn, error) {
	return func(ctx context.Context, network, address string) (net.Conn, error) {
		for since := (time.Time{}); ; {
			start := time.Now()
			conn, err := a.dial(ctx, network, address)
			r.dialed(start, err)
			switch {
			case err == nil && !since.IsZero():
				took := time.Since(since).Round(time.Millisecond)
				log.Info("API server reachable again", "address", address, "took", took)
				return conn, nil
			case err == nil:
				return conn, nil
			case since.IsZero():
				log.Warn("API server unreachable; its last known state stays in use", "address", address, "err", err)
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
