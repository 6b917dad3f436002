/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
#pragma once
#include "types.h"

#define MAX_FRONTENDS 16384
#define MAX_BACKENDS 65536

struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__type(key, struct frontend_key);
	__type(value, struct frontend);
	__uint(max_entries, MAX_FRONTENDS);
} frontends SEC(".maps");

/* Frontend id → its table. Element 0 is the number of slots, the slots follow; each is a backend id. A table is swapped
 * as a whole and never edited, so its size and its slots always belong together. */
struct table {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(map_flags, BPF_F_INNER_MAP);
	__type(key, __u32);
	__type(value, __u32);
	__uint(max_entries, 1);
};

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY_OF_MAPS);
	__type(key, __u32);
	__uint(max_entries, MAX_FRONTENDS);
	__array(values, struct table);
} tables SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__type(key, __u32);
	__type(value, struct backend);
	__uint(max_entries, MAX_BACKENDS);
} backends SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__type(key, struct addr);
	__type(value, struct vip);
	__uint(max_entries, MAX_FRONTENDS);
} vips SEC(".maps");

/* Flows whose client has proved itself. Not an LRU: a flood must not push anybody out. Sized when loaded. */
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, struct flow_key);
	__type(value, struct flow);
	__uint(max_entries, 1024);
} flows SEC(".maps");

/* All others. Losing one costs its client a retransmission. */
struct {
	__uint(type, BPF_MAP_TYPE_LRU_HASH);
	__type(key, struct flow_key);
	__type(value, struct flow);
	__uint(max_entries, 1024);
} halfopen SEC(".maps");

/* How many flows a CPU has opened, for SPREAD_TURNS. */
struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__type(key, __u32);
	__type(value, __u32);
	__uint(max_entries, MAX_FRONTENDS);
} turns SEC(".maps");

/* Interfaces, by index, from which native XDP may send. */
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__type(key, __u32);
	__type(value, __u32);
	__uint(max_entries, 256);
} uplinks SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__type(key, __u32);
	__type(value, struct traffic);
	__uint(max_entries, MAX_FRONTENDS);
} by_frontend SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__type(key, __u32);
	__type(value, struct traffic);
	__uint(max_entries, MAX_BACKENDS);
} by_backend SEC(".maps");

/* Packets by ACTION * REASON_MAX + REASON. */
struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__type(key, __u32);
	__type(value, __u64);
	__uint(max_entries, ACTION_MAX *REASON_MAX);
} verdicts SEC(".maps");
