package healthd

import (
	"bytes"
	"context"
	"errors"
	"os"
	"time"
)

// udpChecker sends a datagram. An ICMP error is a failure. With a Body an answer that has it is required; without one,
// silence until shortly before the timeout is success, for nothing else can be known.
type udpChecker struct{ target }

func (c udpChecker) Probe(ctx context.Context) (Result, error) {
	d, to, err := c.dialer("udp")
	if err != nil {
		return Result{Weight: -1}, err
	}
	conn, err := d.DialContext(ctx, "udp", to.String())
	if err != nil {
		return Result{Weight: -1}, err
	}
	defer conn.Close()
	defer context.AfterFunc(ctx, func() { conn.SetDeadline(time.Unix(1, 0)) })()
	if deadline, set := ctx.Deadline(); set {
		// Silence must be told from a probe that ran out of time.
		conn.SetReadDeadline(deadline.Add(-time.Until(deadline) / 10))
	}
	if _, err := conn.Write([]byte(c.Spec.Send)); err != nil {
		return Result{Weight: -1}, err
	}
	answer := make([]byte, maxBody)
	for {
		n, err := conn.Read(answer)
		switch {
		case errors.Is(err, os.ErrDeadlineExceeded) && c.Spec.Body == "" && ctx.Err() == nil:
			return ok("no error came back")
		case err != nil:
			return Result{Weight: -1}, err
		case c.Spec.Body == "" || bytes.Contains(answer[:n], []byte(c.Spec.Body)):
			return ok("answered")
		}
	}
}
