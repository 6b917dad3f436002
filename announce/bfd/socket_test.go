package bfd

import (
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/steelyard-lb/steelyard/e2e/lab/labtest"
)

// A port that is in use for a moment is waited for; one that stays in use is an error.
func TestPortInUse(t *testing.T) {
	h := labtest.Host(t, labtest.New(t), "node")
	err := h.Do(func() error {
		first, err := listen()
		if err != nil {
			return err
		}
		release := func() {
			for _, l := range first {
				_ = unix.Close(l.fd)
			}
		}
		if second, err := listen(); err == nil || len(second) > 0 {
			t.Errorf("the ports of another one were opened: %d, %v", len(second), err)
		}
		time.AfterFunc(5*bindRetry, release)
		second, err := listen()
		for _, l := range second {
			_ = unix.Close(l.fd)
		}
		return err
	})
	if err != nil {
		t.Error(err)
	}
}
