package healthd

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"strings"
	"syscall"
	"time"

	"github.com/steelyard-lb/steelyard/lb"
	"github.com/steelyard-lb/steelyard/lb/printable"
)

// Checker runs one probe. If the probe fails, it returns an error whose text is the reason, and the Result is ignored.
type Checker interface {
	Probe(ctx context.Context) (Result, error)
}

// Result is the result of a successful probe.
type Result struct {
	Err    error  // why the probe failed; set by the Prober
	Reason string // "HTTP 200"
	Weight int    // the weight that the backend reports, or -1
}

// drainingError is the error of a backend that accepts no new flows. Its existing flows continue.
type drainingError struct{ error }

// stateFor returns the state that the error of a probe indicates.
func stateFor(err error) lb.State {
	switch {
	case err == nil:
		return lb.StateHealthy
	case errors.As(err, new(drainingError)):
		return lb.StateDraining
	}
	return lb.StateUnhealthy
}

// checkers has a constructor for every lb.CheckType except CheckNone.
var checkers = map[lb.CheckType]func(target) Checker{
	lb.CheckTCP:      func(t target) Checker { return tcpChecker{t} },
	lb.CheckHTTP:     newHTTPChecker,
	lb.CheckHTTP2:    newHTTPChecker,
	lb.CheckHTTPS:    newHTTPChecker,
	lb.CheckUDP:      func(t target) Checker { return udpChecker{t} },
	lb.CheckDNS:      func(t target) Checker { return dnsChecker{t} },
	lb.CheckGRPC:     func(t target) Checker { return grpcChecker{t} },
	lb.CheckExec:     func(t target) Checker { return execChecker{t} },
	lb.CheckEcho:     func(t target) Checker { return echoChecker{t} },
	lb.CheckNodePort: func(t target) Checker { return nodePortChecker{newHTTPChecker(t).(httpChecker)} },
}

func ok(reason string) (Result, error) { return Result{Reason: reason, Weight: -1}, nil }

func fail(format string, args ...any) (Result, error) { return Result{}, fmt.Errorf(format, args...) }

// words maps library terms to operators' terms.
var words = strings.NewReplacer("net/http: ", "", "HTTP/1.x transport connection broken: ", "",
	"malformed HTTP ", "not HTTP: malformed ", "readLoopPeekFailLocked: %!w(<nil>)", "sent before the request",
	"http2: failed reading the frame payload: ", "", "http2: client conn could not be established", "not HTTP/2",
	"http2: frame too large, note that the frame header looked like an HTTP/1.1 header", "not HTTP/2")

// reason returns a short text for err, without addresses because users see it next to its backend. Some errors quote
// data from the backend.
func reason(err error, timeout time.Duration) string {
	var op *net.OpError
	switch {
	case isTimeout(err):
		return lb.NoResponse + timeout.String()
	case errors.As(err, new(notRootError)):
	case errors.Is(err, syscall.ECONNREFUSED):
		return "connection refused"
	case errors.Is(err, syscall.ECONNRESET):
		return "connection reset"
	case errors.Is(err, syscall.EHOSTUNREACH):
		return "no route to host"
	case errors.Is(err, syscall.ENETUNREACH):
		return "network unreachable"
	case errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF):
		return "connection closed without a response"
	case errors.As(err, &op):
		err = op.Err
	}
	line, _, _ := strings.Cut(err.Error(), "\n")
	return printable.Cut(words.Replace(line))
}

// cause reduces err to what receivers test with errors.Is: whether anything listens and responds. The original error
// may contain a certificate of 256 KiB.
func cause(err error) error {
	switch {
	case errors.Is(err, syscall.ECONNREFUSED):
		return syscall.ECONNREFUSED
	case isTimeout(err):
		return context.DeadlineExceeded
	}
	return errFailed
}

var errFailed = errors.New("the probe failed")

// isTimeout reports whether err is a timeout, including deadlines of contexts and connections.
func isTimeout(err error) bool {
	var t interface{ Timeout() bool }
	return errors.As(err, &t) && t.Timeout()
}
