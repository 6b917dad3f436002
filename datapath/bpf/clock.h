/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/* Ages of entries. If another CPU wrote an entry after this one read the clock, its age is 0. */
#pragma once
#include "config.h"

/* A unit of the flow clock is 4 ms, fine enough to compare the ages of half-open flows when thousands open per second.
 * The clock wraps after 208 days. */
#define FLOW_CLOCK_SHIFT 22

static __always_inline __u32 flow_clock(void)
{
	return bpf_ktime_get_coarse_ns() >> FLOW_CLOCK_SHIFT;
}

/* age_clock converts the time of CLOCK_MONOTONIC_COARSE to the unit in which flows store when they opened. Established
 * flows may be much older than the flow clock's range. This clock has a unit of 67 ms and wraps after 9 years. */
#define AGE_CLOCK_SHIFT 26

static __always_inline __u32 age_clock(__u64 now)
{
	return now >> AGE_CLOCK_SHIFT;
}

/* flow_elapsed returns the time since then in units of flow_clock. */
static __always_inline __u32 flow_elapsed(__u32 then, __u32 now)
{
	return (__s32)(now - then) > 0 ? now - then : 0;
}

/* handshake_clock returns the time in units of 1,024 ns, in which handshakes are measured. The coarse clock advances by
 * milliseconds. */
static __always_inline __u32 handshake_clock(void)
{
	return bpf_ktime_get_ns() >> 10;
}

/* elapsed returns the time since then in nanoseconds. */
static __always_inline __u64 elapsed(__u64 then, __u64 now)
{
	return now > then ? now - then : 0;
}
