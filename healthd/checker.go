package healthd

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"strings"
	"syscall"
	"time"

	"github.com/steelyard-lb/steelyard/lb"
)

// Checker asks once. It returns an error whose text is the reason, for people, when the backend is not well.
type Checker interface {
	Probe(ctx context.Context) (Result, error)
}

// Result is what a backend that is well says of itself.
type Result struct {
	Err    error  // why the probe failed; set by the Prober
	Reason string // "HTTP 200"
	Weight int    // -1: nothing
}

// checkers has an entry for every lb.CheckType that asks something.
var checkers = map[lb.CheckType]func(target) Checker{
	lb.CheckTCP:      func(t target) Checker { return tcpChecker{t} },
	lb.CheckHTTP:     func(t target) Checker { return httpChecker{t, "http"} },
	lb.CheckHTTPS:    func(t target) Checker { return httpChecker{t, "https"} },
	lb.CheckUDP:      func(t target) Checker { return udpChecker{t} },
	lb.CheckDNS:      func(t target) Checker { return dnsChecker{t} },
	lb.CheckGRPC:     func(t target) Checker { return grpcChecker{t} },
	lb.CheckExec:     func(t target) Checker { return execChecker{t} },
	lb.CheckNodePort: func(t target) Checker { return nodePortChecker{t} },
}

func ok(reason string) (Result, error) { return Result{Reason: reason, Weight: -1}, nil }

func fail(format string, args ...any) (Result, error) {
	return Result{Weight: -1}, fmt.Errorf(format, args...)
}

// reason says in a few words what went wrong, without the addresses that stand beside it anyway.
func reason(err error, timeout time.Duration) string {
	var op *net.OpError
	switch {
	case errors.Is(err, context.DeadlineExceeded) || errors.Is(err, os.ErrDeadlineExceeded) || isTimeout(err):
		return fmt.Sprintf("no answer within %s", timeout)
	case errors.Is(err, syscall.ECONNREFUSED):
		return "connection refused"
	case errors.Is(err, syscall.ECONNRESET):
		return "connection reset"
	case errors.Is(err, syscall.EHOSTUNREACH):
		return "no route to host"
	case errors.Is(err, syscall.ENETUNREACH):
		return "network unreachable"
	case errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF):
		return "connection closed without an answer"
	case errors.As(err, &op) && op.Err != nil:
		return op.Err.Error()
	}
	text, _, _ := strings.Cut(err.Error(), "\n")
	return text
}

func isTimeout(err error) bool {
	var t interface{ Timeout() bool }
	return errors.As(err, &t) && t.Timeout()
}
