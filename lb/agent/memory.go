package agent

import (
	"context"
	"os"
	"runtime/debug"
	"time"
)

// Reading a configuration of 10,000 services takes ten times the memory that the agent then needs, and the initial
// lists of a cluster take several times as much. Go is slow to return memory, so the agent forces it to.

// collectorPercent is GOGC if it is not set: garbage of up to two fifths of the memory in use, for slightly more CPU
// time. Changes leave little garbage.
const collectorPercent = 40

// releaseDelay is the time in which a reload's changes reach the datapath. storeDelay is the time after startup in
// which routes are announced and a large cluster's state is stored.
const (
	releaseDelay = time.Second
	storeDelay   = 15 * time.Second
)

// limitGarbage sets the garbage collection target (GOGC).
func limitGarbage() {
	if os.Getenv("GOGC") == "" {
		debug.SetGCPercent(collectorPercent)
	}
}

// releaseMemory returns memory to the system after releaseDelay.
func releaseMemory() { time.AfterFunc(releaseDelay, debug.FreeOSMemory) }

// releaseAfterStart releases memory once the datapath has all services, which takes a long time in a large cluster, and
// again storeDelay later. behind returns when the datapath began to lack a service, or zero if it has all.
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
