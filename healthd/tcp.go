package healthd

import (
	"context"
	"net"
)

// tcpChecker opens a connection and resets it, so that neither side enters TIME_WAIT.
type tcpChecker struct{ target }

func (c tcpChecker) Probe(ctx context.Context) (Result, error) {
	d, to, err := c.dialer("tcp")
	if err != nil {
		return Result{}, err
	}
	conn, err := d.DialContext(ctx, "tcp", to.String())
	if err != nil {
		return Result{}, err
	}
	defer conn.Close()
	if t, isTCP := conn.(*net.TCPConn); isTCP {
		t.SetLinger(0)
	}
	return ok("connected")
}
