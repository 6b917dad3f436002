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
	"testing"
	"time"
)

func TestReason(t *testing.T) {
	dial := func(err error) error { return &net.OpError{Op: "dial", Net: "tcp", Err: err} }
	for _, tt := range []struct {
		err  error
		want string
	}{
		{context.DeadlineExceeded, "no response within 1s"},
		{fmt.Errorf("read: %w", os.ErrDeadlineExceeded), "no response within 1s"},
		{dial(syscall.ETIMEDOUT), "no response within 1s"},
		{dial(os.NewSyscallError("connect", syscall.ECONNREFUSED)), "connection refused"},
		{dial(syscall.ECONNRESET), "connection reset"},
		{dial(syscall.EHOSTUNREACH), "no route to host"},
		{dial(syscall.ENETUNREACH), "network unreachable"},
		{io.EOF, "connection closed without a response"},
		{fmt.Errorf("read: %w", io.ErrUnexpectedEOF), "connection closed without a response"},
		{fmt.Errorf("outer: %w", dial(errors.New("inner"))), "inner"},
		{errors.New("first line\nsecond line"), "first line"},
		{dial(errors.New("\x1b[2JOK")), "�[2JOK"},
		{errors.New("readLoopPeekFailLocked: %!w(<nil>)"), "sent before the request"}, // of net/http
		{errors.New(strings.Repeat("x", 1<<20)), strings.Repeat("x", 200) + "…"},
	} {
		if got := reason(tt.err, time.Second); got != tt.want {
			t.Errorf("%v: %q; want %q", tt.err, got, tt.want)
		}
	}
}

// A Result without a weight says so by -1: 0 is a weight.
func TestResultWithoutWeight(t *testing.T) {
	if r, err := ok("fine"); err != nil || r != (Result{Reason: "fine", Weight: -1}) {
		t.Errorf("%+v, %v", r, err)
	}
}
