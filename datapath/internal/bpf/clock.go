package bpf

import (
	"time"

	"golang.org/x/sys/unix"
)

// Uptime is bpf_ktime_get_coarse_ns.
func Uptime() time.Duration {
	var t unix.Timespec
	if err := unix.ClockGettime(unix.CLOCK_MONOTONIC_COARSE, &t); err != nil {
		panic("datapath: no monotonic clock: " + err.Error())
	}
	return time.Duration(t.Nano())
}

// flowClockShift is FLOW_CLOCK_SHIFT of bpf/flow.h: the unit in which flows have the time of their last packet.
const flowClockShift = 22

// FlowClock returns an uptime in the unit of the flows.
func FlowClock(uptime time.Duration) uint32 { return uint32(uptime >> flowClockShift) }

// Idle returns how long ago a flow was seen.
func Idle(now time.Duration, seen uint32) time.Duration {
	return time.Duration(int32(FlowClock(now)-seen)) << flowClockShift
}
