package agent

import (
	"context"
	"os"
	"runtime/debug"
	"time"
)

// To read a configuration of 10,000 services takes ten times the memory that the agent then needs, and the initial
// lists of a cluster several times. Go gives memory back slowly, so the agent asks for it.

// collectorPercent is GOGC unless that is set: garbage up to two fifths of what is in use, for a little more CPU.
// Changes leave little garbage.
const collectorPercent = 40

// releaseDelay is the time after a reload in which its changes reach the datapath, and storeDelay that after a start in
// which routes are announced and the state of a large cluster is stored.
const (
	releaseDelay = time.Second
	storeDelay   = 15 * time.Second
)

// limitGarbage sets the garbage collector's share.
func limitGarbage() {
	if os.Getenv("GOGC") == "" {
		debug.SetGCPercent(collectorPercent)
	}
}

// releaseMemory gives memory back to the system a little later.
func releaseMemory() { time.AfterFunc(releaseDelay, debug.FreeOSMemory) }

// releaseAfterStart releases memory once the datapath has all services, which takes long in a large cluster, and again
// when they are announced and stored. Behind returns since when it lacks one.
func releaseAfterStart(ctx context.Context, behind func() time.Time, release func()) {
	wait := func(d time.Duration) bool {
		select {
		case <-ctx.Done():
			return false
		case <-time.After(d):
			return true
		}
	}
	for wait(releaseDelay) {
		if behind().IsZero() {
			release()
			if wait(storeDelay) {
				release()
			}
			return
		}
	}
}
