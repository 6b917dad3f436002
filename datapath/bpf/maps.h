/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
#pragma once
#include "types.h"

#define MAX_FRONTENDS 65536
#define MAX_BACKENDS 131072

#include "maps_nat.h"

/* CHUNK_LOOKUP looks up an element of an array that grows by chunks. Such an array is an array of arrays of the same
 * size, to which the agent adds chunks as ids need them. A chunk stays until cleanup and is never replaced. So memory
 * follows the configuration, no change waits for a grace period, and the verifier inlines both lookups, which it could
 * not do if each frontend had a table of its own size. */
#define CHUNK_LOOKUP(outer, id, per_chunk)                                      \
	({                                                                      \
		__u32 chunk_ = (id) / (per_chunk), index_ = (id) % (per_chunk); \
		void *map_ = bpf_map_lookup_elem(outer, &chunk_);               \
		map_ ? bpf_map_lookup_elem(map_, &index_) : 0;                  \
	})

/* Address, port and protocol → frontend. */
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, struct frontend_key);
	__type(value, struct frontend);
	__uint(max_entries, MAX_FRONTENDS);
} sy_frontends SEC(".maps");

/* Frontends with port ranges, looked up when sy_frontends has no entry. */
struct {
	__uint(type, BPF_MAP_TYPE_LPM_TRIE);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, struct range_key);
	__type(value, struct frontend);
	__uint(max_entries, MAX_FRONTENDS);
} sy_port_ranges SEC(".maps");

/* Sources that may open flows to restricted frontends. */
struct {
	__uint(type, BPF_MAP_TYPE_LPM_TRIE);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, struct allow_key);
	__type(value, __u32);
	__uint(max_entries, 1 << 20);
} sy_src_allow SEC(".maps");

#define SLOT_CHUNK 65536 /* words */

/* Words of all tables (struct table). The agent writes a new table to words that no frontend refers to and then changes
 * the frontend, so no packet reads a partial table. */
struct sy_slot_chunk {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(map_flags, BPF_F_MMAPABLE);
	__type(key, __u32);
	__type(value, struct slot_line);
	__uint(max_entries, SLOT_CHUNK / LINE_WORDS);
};

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY_OF_MAPS);
	__type(key, __u32);
	__uint(max_entries, 1024);
	__array(values, struct sy_slot_chunk);
} sy_slots SEC(".maps");

#define BACKEND_CHUNK 1024

/* Backend id → backend. */
struct sy_backend_chunk {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__type(key, __u32);
	__type(value, struct backend);
	__uint(max_entries, BACKEND_CHUNK);
};

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY_OF_MAPS);
	__type(key, __u32);
	__uint(max_entries, MAX_BACKENDS / BACKEND_CHUNK);
	__array(values, struct sy_backend_chunk);
} sy_backends SEC(".maps");

static __always_inline struct backend *backend_get(__u32 id)
{
	return CHUNK_LOOKUP(&sy_backends, id, BACKEND_CHUNK);
}

/* Frontend and backend → weight. */
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, struct member_key);
	__type(value, __u32);
	__uint(max_entries, 1 << 20);
} sy_weights SEC(".maps");

/* Frontend and backend → the first generation of the backend whose flows have not ended for the frontend. The agent
 * adds an entry when a backend goes down for a frontend, and deletes it after removing the ended flows. */
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, struct member_key);
	__type(value, __u32);
	__uint(max_entries, 1 << 18);
} sy_ended SEC(".maps");

/* Open flows by backend id. The number is exact after each of the agent's walks through the flow tables, and updated in
 * between. */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__type(key, __u32);
	__type(value, __u32);
	__uint(max_entries, MAX_BACKENDS);
} sy_backend_load SEC(".maps");

/* Client and frontend → the client's last backend. */
struct {
	__uint(type, BPF_MAP_TYPE_LRU_HASH);
	__type(key, struct affinity_key);
	__type(value, struct affinity);
	__uint(max_entries, 1024);
} sy_affinity SEC(".maps");

/* Addresses of frontends. */
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, struct addr);
	__type(value, struct vip);
	__uint(max_entries, MAX_FRONTENDS);
} sy_vips SEC(".maps");

/* What an address may be, by its hash: 4 bits (enum addr_kind) for each of 131,072 values. Because of this, packets
 * that are not ours need no lookup in a hash map. */
#define ADDR_FILTER_WORDS 8192
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__type(key, __u32);
	__type(value, __u64);
	__uint(max_entries, ADDR_FILTER_WORDS);
} sy_addr_filter SEC(".maps");

/* Address of a frontend by id, the source of replies. */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__type(key, __u32);
	__type(value, struct addr);
	__uint(max_entries, MAX_FRONTENDS);
} sy_frontend_vips SEC(".maps");

/* Address of a backend → id. Only packets from these addresses are looked up as replies. */
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, struct addr);
	__type(value, __u32);
	__uint(max_entries, MAX_BACKENDS);
} sy_servers SEC(".maps");

/* Direct-return flows (DSR and tunnel) whose client sent more than the first packet. This proves little, because
 * replies do not pass here. An LRU map is sufficient, because only flows in slots that have changed their backend need
 * their entry. */
struct {
	__uint(type, BPF_MAP_TYPE_LRU_HASH);
	__type(key, struct flow_key);
	__type(value, struct dsr_flow);
	__uint(max_entries, 1024);
} sy_dsr_flows SEC(".maps");

/* Direct-return flows after their first packet, if the hash does not determine their backend. */
struct {
	__uint(type, BPF_MAP_TYPE_LRU_HASH);
	__type(key, struct flow_key);
	__type(value, struct dsr_flow);
	__uint(max_entries, 1024);
} sy_dsr_halfopen SEC(".maps");

/* One bit per value of the low bits of a flow hash, which selects the packets whose flow is looked up. It is set from
 * the first packet of a DSR flow until its entry is in sy_dsr_flows, and from a FIN or RST until the next packet. */
#define DSR_PENDING_WORDS 4096
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__type(key, __u32);
	__type(value, __u64);
	__uint(max_entries, DSR_PENDING_WORDS);
} sy_dsr_pending SEC(".maps");

/* Fragmented datagram → its ports. */
struct {
	__uint(type, BPF_MAP_TYPE_LRU_HASH);
	__type(key, struct fragment_key);
	__type(value, struct fragment);
	__uint(max_entries, 16384);
} sy_frags SEC(".maps");

/* Path MTU by address of a backend behind a tunnel. Only the agent adds keys, so ICMP errors can neither fill nor
 * poison the map. */
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, struct addr);
	__type(value, struct pmtu);
	__uint(max_entries, MAX_BACKENDS);
} sy_pmtu SEC(".maps");

/* Addresses of this node, where tunnels may end, and the broadcast addresses of its links. No packet comes from any of
 * them. 1: only lo has the address, so decapsulated packets may go there. */
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, struct addr);
	__type(value, __u32);
	__uint(max_entries, 65536);
} sy_local_addrs SEC(".maps");

/* Sources from which tunnel packets are accepted; frontend is 0. */
struct {
	__uint(type, BPF_MAP_TYPE_LPM_TRIE);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, struct allow_key);
	__type(value, __u32);
	__uint(max_entries, 16384);
} sy_tunnel_src SEC(".maps");

/* Keys of the tunnels between nodes. */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__type(key, __u32);
	__type(value, struct tunnel_keys);
	__uint(max_entries, 1);
} sy_tunnel_keys SEC(".maps");

/* Destination of decapsulated packets → overhead of their tunnel in bytes. */
struct {
	__uint(type, BPF_MAP_TYPE_LRU_HASH);
	__type(key, struct addr);
	__type(value, __u32);
	__uint(max_entries, 4096);
} sy_tunnel_hlen SEC(".maps");

/* Mark of a health check → its server. */
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, __u32);
	__type(value, struct probe);
	__uint(max_entries, MAX_BACKENDS);
} sy_probes SEC(".maps");

/* Rate limit of answers, per CPU, by enum answer_kind. */
struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__type(key, __u32);
	__type(value, struct token_bucket);
	__uint(max_entries, 3);
} sy_answer_rate SEC(".maps");

/* Next hops from the kernel's routes, cached briefly, per CPU (route.h). */
#define NEXT_HOPS 4096
struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__type(key, __u32);
	__type(value, struct next_hop);
	__uint(max_entries, NEXT_HOPS);
} sy_next_hops SEC(".maps");

/* Uplinks with XDP, by the low bits of their interface index. An array lookup costs a packet almost nothing. If another
 * uplink already has an uplink's element, tc handles the second one. */
#define UPLINKS 256
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__type(key, __u32);
	__type(value, struct uplink);
	__uint(max_entries, UPLINKS);
} sy_uplinks SEC(".maps");

static __always_inline struct uplink *uplink_get(__u32 ifindex)
{
	__u32 i = ifindex % UPLINKS;
	struct uplink *up = bpf_map_lookup_elem(&sy_uplinks, &i);

	return up && up->ifindex == ifindex ? up : 0;
}

/* uplink_xmits reports whether native XDP may send from an interface. */
static __always_inline int uplink_xmits(__u32 ifindex)
{
	struct uplink *up = uplink_get(ifindex);

	return up && up->xmit;
}

#define COUNTER_CHUNK 1024

struct sy_counter_chunk {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__type(key, __u32);
	__type(value, struct traffic);
	__uint(max_entries, COUNTER_CHUNK);
};

/* Traffic by frontend id. */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY_OF_MAPS);
	__type(key, __u32);
	__uint(max_entries, MAX_FRONTENDS / COUNTER_CHUNK);
	__array(values, struct sy_counter_chunk);
} sy_fe_counters SEC(".maps");

static __always_inline struct traffic *frontend_traffic(__u32 id)
{
	return CHUNK_LOOKUP(&sy_fe_counters, id, COUNTER_CHUNK);
}

/* Traffic by backend id. */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY_OF_MAPS);
	__type(key, __u32);
	__uint(max_entries, MAX_BACKENDS / COUNTER_CHUNK);
	__array(values, struct sy_counter_chunk);
} sy_be_counters SEC(".maps");

static __always_inline struct traffic *backend_traffic(__u32 id)
{
	return CHUNK_LOOKUP(&sy_be_counters, id, COUNTER_CHUNK);
}

/* Packets by action * REASON_MAX + reason. */
struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__type(key, __u32);
	__type(value, __u64);
	__uint(max_entries, ACTION_MAX *REASON_MAX);
} sy_verdicts SEC(".maps");
