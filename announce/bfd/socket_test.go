package bfd

import (
	"testing"
	"time"

	"github.com/steelyard-lb/steelyard/e2e/lab/labtest"
)

// A port that is in use for a moment is waited for; one that stays in use is an error.
func TestPortInUse(t *testing.T) {
	h := labtest.Host(t, labtest.New(t), "node")
	err := h.Do(func() error {
		var first, second Monitor
		first.devices, second.devices = map[string]*device{}, map[string]*device{}
		if err := first.open(); err != nil {
			return err
		}
		if err := second.open(); err == nil || len(second.devices) > 0 {
			t.Errorf("the ports of another one were opened: %v", err)
		}
		time.AfterFunc(5*bindRetry, first.closeDevices)
		err := second.open()
		second.closeDevices()
		return err
	})
	if err != nil {
		t.Error(err)
	}
}
