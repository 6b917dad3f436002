package agent

import (
	"os"
	"runtime/debug"
	"time"
)

// To read a configuration of 10,000 services takes ten times the memory that the agent then needs, and the initial
// lists of a cluster several times. Go gives memory back slowly, so the agent asks for it.

// collectorPercent is GOGC unless that is set: garbage up to half of what is in use, for a little more CPU. Changes
// leave little garbage.
const collectorPercent = 50

// releaseDelay is the time after a start or a reload in which its changes reach the datapath.
const releaseDelay = time.Second

// limitGarbage sets the garbage collector's share.
func limitGarbage() {
	if os.Getenv("GOGC") == "" {
		debug.SetGCPercent(collectorPercent)
	}
}

// releaseMemory gives memory back to the system a little later.
func releaseMemory() { time.AfterFunc(releaseDelay, debug.FreeOSMemory) }
