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

// flowClockShift is FLOW_CLOCK_SHIFT of bpf/flow.h. It determines the unit of the time of a flow's last packet.
const flowClockShift = 22

// FlowClock converts an uptime to the unit that flows use.
func FlowClock(uptime time.Duration) uint32 { return uint32(uptime >> flowClockShift) }

// Idle returns how long ago a flow was last seen.
func Idle(now time.Duration, seen uint32) time.Duration {
	return time.Duration(int32(FlowClock(now)-seen)) << flowClockShift
}
