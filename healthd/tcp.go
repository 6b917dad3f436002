package healthd

import (
	"context"
	"net"

	"github.com/steelyard-lb/steelyard/lb"
)

// tcpChecker connects and resets the connection, so that neither side keeps it in TIME_WAIT.
type tcpChecker struct{ lb.Check }

func (c tcpChecker) Probe(ctx context.Context) (Result, error) {
	var d net.Dialer
	conn, err := d.DialContext(ctx, "tcp", c.Target.String())
	if err != nil {
		return Result{Weight: -1}, err
	}
	defer conn.Close()
	if t, isTCP := conn.(*net.TCPConn); isTCP {
		t.SetLinger(0) // it fails only on a closed socket
	}
	return ok("connected")
}
