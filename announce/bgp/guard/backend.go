package guard

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"syscall"
	"time"
)

// backendHoldTime is negotiated with the backend, in seconds. It is long because events, not timers, end these
// sessions. backendKeepalive is far shorter than required.
const (
	backendHoldTime  = 65535
	backendKeepalive = time.Hour
	// backendTimeout limits how long the backend may take to accept a session.
	backendTimeout = 10 * time.Second
	backendRetry   = 2 * time.Millisecond
)

// Backend is the source of a session's routes: a BGP speaker on the loopback interface that waits for a connection from
// From. The MD5 key keeps other local processes from connecting.
type Backend struct {
	At   netip.AddrPort
	From netip.Addr
	Key  string
}

// connect opens a session with the backend on the peer's behalf. To the backend it looks like the peer's session, but
// the OPEN is rebuilt from checked fields. connect returns once the backend has accepted the session.
func (b *Backend) connect(
	ctx context.Context, dial func(context.Context, *Backend) (net.Conn, error), peer *Open,
) (net.Conn, *messageReader, error) {
	open := Open{
		ASN: peer.ASN, HoldTime: backendHoldTime, ID: b.From, V4: peer.V4, V6: peer.V6, FourOctetAS: peer.FourOctetAS,
		RouteRefresh: true, GracefulRestart: true, // makes the backend send End-of-RIB
	}
	ctx, cancel := context.WithTimeout(ctx, backendTimeout)
	defer cancel()
	for {
		conn, r, err := b.handshake(ctx, dial, &open)
		if err == nil {
			return conn, r, nil
		}
		select { // the backend closes connections that it does not expect yet
		case <-ctx.Done():
			return nil, nil, fmt.Errorf("connect to the routing table at %v: %w", b.At, err)
		case <-time.After(backendRetry):
		}
	}
}

func dialBackend(ctx context.Context, b *Backend) (net.Conn, error) {
	key := Config{Address: b.At.Addr(), Password: b.Key}
	d := net.Dialer{
		LocalAddr: net.TCPAddrFromAddrPort(netip.AddrPortFrom(b.From, 0)), KeepAlive: -1,
		Control: func(_, _ string, raw syscall.RawConn) error {
			return control(raw, func(fd int) error { return setKey(fd, &key) })
		},
	}
	return d.DialContext(ctx, "tcp", b.At.String())
}

func (b *Backend) handshake(
	ctx context.Context, dial func(context.Context, *Backend) (net.Conn, error), open *Open,
) (net.Conn, *messageReader, error) {
	conn, err := dial(ctx, b)
	if err != nil {
		return nil, nil, err
	}
	stop := context.AfterFunc(ctx, func() { conn.Close() })
	r := newMessageReader(conn)
	err = b.exchange(conn, r, open)
	if !stop() {
		err = errors.Join(err, ctx.Err())
	}
	if err != nil {
		conn.Close()
		return nil, nil, err
	}
	return conn, r, nil
}

// exchange sends and receives OPEN and KEEPALIVE.
func (b *Backend) exchange(conn net.Conn, r *messageReader, open *Open) error {
	for _, step := range []struct {
		send []byte
		want messageType
	}{{nil, typeOpen}, {open.message(), typeKeepalive}, {keepalive, 0}} {
		if _, err := conn.Write(step.send); err != nil {
			return err
		}
		if step.want == 0 {
			break
		}
		m, err := r.next()
		if err != nil {
			return err
		}
		if m.kind != step.want {
			return fmt.Errorf("received %v instead of %v", m.kind, step.want)
		}
	}
	return nil
}
