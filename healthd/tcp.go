package healthd

import (
	"context"
	"net"
)

// tcpChecker connects and resets the connection, so that neither side keeps it in TIME_WAIT.
type tcpChecker struct{ target }

func (c tcpChecker) Probe(ctx context.Context) (Result, error) {
	d, to, err := c.dialer("tcp")
	if err != nil {
		return Result{Weight: -1}, err
	}
	conn, err := d.DialContext(ctx, "tcp", to.String())
	if err != nil {
		return Result{Weight: -1}, err
	}
	defer conn.Close()
	if t, isTCP := conn.(*net.TCPConn); isTCP {
		t.SetLinger(0) // it fails only on a closed socket
	}
	return ok("connected")
}
