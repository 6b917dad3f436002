package agent

import (
	"slices"
	"testing"
	"testing/synctest"
	"time"
)

// Memory is released when the datapath has all services, not before, and again when they are stored.
func TestMemoryIsReleasedAfterTheStart(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		start, took := time.Now(), 20*time.Second
		behind := func() time.Time {
			if time.Since(start) < took {
				return start
			}
			return time.Time{}
		}
		var released []time.Duration
		releaseAfterStart(t.Context(), behind, func() { released = append(released, time.Since(start)) })
		if want := []time.Duration{took, took + storeDelay}; !slices.Equal(released, want) {
			t.Errorf("released after %s; want %s", released, want)
		}
	})
}
