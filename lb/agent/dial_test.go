package agent

import (
	"context"
	"log/slog"
	"net"
	"testing"
	"time"
)

func TestRetryingDial(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	at := l.Addr().String()
	l.Close()
	away := new(reachability)
	dial := retryingDial(slog.New(slog.DiscardHandler), away)

	ctx, cancel := context.WithTimeout(t.Context(), dialInterval/2)
	defer cancel()
	if conn, err := dial(ctx, "tcp", at); err == nil {
		conn.Close()
		t.Error("connected without a listener")
	}
	if away.awaySince().IsZero() {
		t.Error("the API server is not away")
	}
	time.AfterFunc(dialInterval/2, func() {
		if l, err = net.Listen("tcp", at); err == nil {
			t.Cleanup(func() { l.Close() })
		}
	})
	start := time.Now()
	conn, err := dial(t.Context(), "tcp", at)
	if err != nil {
		t.Fatal(err)
	}
	conn.Close()
	if !away.awaySince().IsZero() {
		t.Error("the API server is away")
	}
	if took := time.Since(start); took < dialInterval/2 || took > 3*dialInterval {
		t.Errorf("connected after %s", took)
	}
}
