package healthd

import (
	"bytes"
	"context"
	"errors"
	"os"
	"time"
)

// udpChecker sends a datagram. An ICMP error is a failure. With a Body, a response must contain it. Without one, the
// probe succeeds if there is no error until shortly before the timeout, because UDP provides no other evidence.
type udpChecker struct{ target }

// maxDatagrams limits the datagrams read per probe: a server may respond with several, but not with a flood.
const maxDatagrams = 16

func (c udpChecker) Probe(ctx context.Context) (Result, error) {
	d, to, err := c.dialer("udp")
	if err != nil {
		return Result{}, err
	}
	conn, err := d.DialContext(ctx, "udp", to.String())
	if err != nil {
		return Result{}, err
	}
	defer conn.Close()
	defer context.AfterFunc(ctx, func() { conn.SetDeadline(time.Unix(1, 0)) })()
	if deadline, set := ctx.Deadline(); set {
		// The read ends before the probe does, so that silence does not look like a probe timeout. On a busy machine,
		// this goroutine may run only after both deadlines.
		conn.SetReadDeadline(deadline.Add(-time.Until(deadline) / 10))
	}
	if _, err := conn.Write([]byte(c.Spec.Send)); err != nil {
		return Result{}, err
	}
	resp := make([]byte, maxBody)
	for range maxDatagrams {
		n, err := conn.Read(resp)
		switch {
		case errors.Is(err, os.ErrDeadlineExceeded) && c.Spec.Body == "" && !errors.Is(ctx.Err(), context.Canceled):
			return ok("no error received")
		case err != nil:
			return Result{}, err
		case c.Spec.Body == "" || bytes.Contains(resp[:n], []byte(c.Spec.Body)):
			return ok("response received")
		}
	}
	return fail("%d datagrams without %q", maxDatagrams, c.Spec.Body)
}
