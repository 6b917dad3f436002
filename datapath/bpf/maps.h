/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
#pragma once
#include "types.h"

#define MAX_FRONTENDS 65536
#define MAX_BACKENDS 131072

struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, struct frontend_key);
	__type(value, struct frontend);
	__uint(max_entries, MAX_FRONTENDS);
} frontends SEC(".maps");

/* Frontends with many ports, looked up when `frontends` has none. */
struct {
	__uint(type, BPF_MAP_TYPE_LPM_TRIE);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, struct range_key);
	__type(value, struct frontend);
	__uint(max_entries, MAX_FRONTENDS);
} ranges SEC(".maps");

/* Sources that may open flows of restricted frontends. */
struct {
	__uint(type, BPF_MAP_TYPE_LPM_TRIE);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, struct allow_key);
	__type(value, __u32);
	__uint(max_entries, 1 << 20);
} allowed SEC(".maps");

/* Frontend id → its table. Element 0 has the number of slots as its backend, the slots follow. Then come those of the last
 * table that had another size, as many as element 0 has as its first previous. A table is swapped as a whole and never edited,
 * so its sizes and its slots always belong together. */
struct table {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(map_flags, BPF_F_INNER_MAP);
	__type(key, __u32);
	__type(value, struct slot);
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

/* Member → its weight. */
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, struct member_key);
	__type(value, __u32);
	__uint(max_entries, 1 << 20);
} members SEC(".maps");

/* Flows of a backend that are open, by its id. Exact after each walk of the agent through the flow tables, and kept up
 * to date in between. */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__type(key, __u32);
	__type(value, __u32);
	__uint(max_entries, MAX_BACKENDS);
} load SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_LRU_HASH);
	__type(key, struct affinity_key);
	__type(value, struct affinity);
	__uint(max_entries, 1024);
} affinities SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(map_flags, BPF_F_NO_PREALLOC);
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

/* Flows by dsr and tunnel whose client has gone on after its first packet. We do not see what servers answer, so that
 * proves little, and an LRU may forget: only flows in slots that have changed hands need their entry. */
struct {
	__uint(type, BPF_MAP_TYPE_LRU_HASH);
	__type(key, struct flow_key);
	__type(value, struct flow);
	__uint(max_entries, 1024);
} oneway SEC(".maps");

/* One bit for each value of the low bits of a flow's hash: a one-way flow with that hash was opened, and has not gone
 * on yet. It tells which packets are worth a look into halfopen. */
#define PENDING_WORDS 4096
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__type(key, __u32);
	__type(value, __u64);
	__uint(max_entries, PENDING_WORDS);
} pending SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_LRU_HASH);
	__type(key, struct fragment_key);
	__type(value, struct fragment);
	__uint(max_entries, 16384);
} fragments SEC(".maps");

/* By address of a backend behind a tunnel. Only the agent makes entries: others could not fill or poison it. */
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, struct addr);
	__type(value, struct path);
	__uint(max_entries, MAX_BACKENDS);
} paths SEC(".maps");

/* Our own addresses, where tunnels end and to which their packets are. */
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__type(key, struct addr);
	__type(value, __u32);
	__uint(max_entries, 4096);
} own SEC(".maps");

/* Who may send us tunnel packets; frontend is 0. */
struct {
	__uint(type, BPF_MAP_TYPE_LPM_TRIE);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, struct allow_key);
	__type(value, __u32);
	__uint(max_entries, 16384);
} peers SEC(".maps");

/* Addresses to which packets came through a tunnel, and the largest packet that such a tunnel takes. */
struct {
	__uint(type, BPF_MAP_TYPE_LRU_HASH);
	__type(key, struct addr);
	__type(value, __u32);
	__uint(max_entries, 4096);
} tunnelled SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, __u32);
	__type(value, struct probe);
	__uint(max_entries, MAX_BACKENDS);
} probes SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__type(key, __u32);
	__type(value, struct bucket);
	__uint(max_entries, 1);
} answers SEC(".maps");

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
