/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
#pragma once
#include "types.h"

#define MAX_FRONTENDS 65536
#define MAX_BACKENDS 131072

#define MAP(kind, flags, k, v, n)                  \
	struct {                                   \
		__uint(type, BPF_MAP_TYPE_##kind); \
		__uint(map_flags, flags);          \
		__type(key, k);                    \
		__type(value, v);                  \
		__uint(max_entries, n);            \
	}
#define HASH(k, v, n) MAP(HASH, BPF_F_NO_PREALLOC, k, v, n)
#define LRU_HASH(k, v, n) MAP(LRU_HASH, 0, k, v, n)
#define LPM_TRIE(k, v, n) MAP(LPM_TRIE, BPF_F_NO_PREALLOC, k, v, n)
#define ARRAY(v, n) MAP(ARRAY, 0, __u32, v, n)
#define PERCPU_ARRAY(v, n) MAP(PERCPU_ARRAY, 0, __u32, v, n)

/* An array that grows by chunks, which are arrays of the same size. The agent adds chunks as ids need them. A chunk
 * stays until cleanup and is never replaced. So memory follows the configuration, no change waits for a grace period,
 * and the verifier inlines both lookups, which it could not do if each frontend had a table of its own size. */
#define CHUNKED(chunk, chunks)                            \
	struct {                                          \
		__uint(type, BPF_MAP_TYPE_ARRAY_OF_MAPS); \
		__type(key, __u32);                       \
		__uint(max_entries, chunks);              \
		__array(values, chunk);                   \
	}
#define CHUNK_LOOKUP(outer, id, per_chunk)                                      \
	({                                                                      \
		__u32 chunk_ = (id) / (per_chunk), index_ = (id) % (per_chunk); \
		void *map_ = bpf_map_lookup_elem(outer, &chunk_);               \
		map_ ? bpf_map_lookup_elem(map_, &index_) : 0;                  \
	})

/* Address, port and protocol → frontend. */
HASH(struct frontend_key, struct frontend, MAX_FRONTENDS) sy_frontends SEC(".maps");

/* Frontends with port ranges, looked up when sy_frontends has no entry. */
LPM_TRIE(struct range_key, struct frontend, MAX_FRONTENDS) sy_port_ranges SEC(".maps");

/* Sources that may open flows to restricted frontends. */
LPM_TRIE(struct allow_key, __u32, 1 << 20) sy_src_allow SEC(".maps");

#define SLOT_CHUNK 65536 /* words */

/* Words of all tables (struct table). The agent writes a new table to words that no frontend refers to and then changes
 * the frontend, so no packet reads a partial table. */
CHUNKED(MAP(ARRAY, BPF_F_MMAPABLE, __u32, struct slot_line, SLOT_CHUNK / LINE_WORDS), 1024) sy_slots SEC(".maps");

#define BACKEND_CHUNK 1024

/* Backend id → backend. */
CHUNKED(ARRAY(struct backend, BACKEND_CHUNK), MAX_BACKENDS / BACKEND_CHUNK) sy_backends SEC(".maps");

static __always_inline struct backend *backend_get(__u32 id)
{
	return CHUNK_LOOKUP(&sy_backends, id, BACKEND_CHUNK);
}

/* Frontend and backend → weight, of frontends with affinity or least connections. */
HASH(struct member_key, __u32, 1 << 18) sy_weights SEC(".maps");

/* Frontend and backend → the first generation of the backend whose flows have not ended for the frontend. The agent
 * adds an entry when a backend goes down for a frontend, and deletes it after removing the ended flows. */
HASH(struct member_key, __u32, 1 << 17) sy_ended SEC(".maps");

/* Open flows by backend id. The number is exact after each of the agent's walks through the flow tables, and updated in
 * between. */
ARRAY(__u32, MAX_BACKENDS) sy_backend_load SEC(".maps");

/* Client and frontend → the client's last backend. */
LRU_HASH(struct affinity_key, struct affinity, 1024) sy_affinity SEC(".maps");

/* Addresses of frontends. */
HASH(struct addr, struct vip, MAX_FRONTENDS) sy_vips SEC(".maps");

/* What an address may be, by its hash: 4 bits (enum addr_kind) for each of 131,072 values. Because of this, packets
 * that are not ours need no lookup in a hash map. */
#define ADDR_FILTER_WORDS 8192
ARRAY(__u64, ADDR_FILTER_WORDS) sy_addr_filter SEC(".maps");

/* Address of a frontend by id, the source of replies. */
ARRAY(struct addr, MAX_FRONTENDS) sy_frontend_vips SEC(".maps");

/* Address of a backend → id. Only packets from these addresses are looked up as replies. */
HASH(struct addr, __u32, MAX_BACKENDS) sy_servers SEC(".maps");

/* Direct-return flows (DSR and tunnel) whose client sent more than the first packet. This proves little, because
 * replies do not pass here. An LRU map is sufficient, because only flows in slots that have changed their backend need
 * their entry. */
LRU_HASH(struct flow_key, struct dsr_flow, 1024) sy_dsr_flows SEC(".maps");

/* Direct-return flows after their first packet, if the hash does not determine their backend. */
LRU_HASH(struct flow_key, struct dsr_flow, 1024) sy_dsr_halfopen SEC(".maps");

/* One bit per value of the low bits of a flow hash, which selects the packets whose flow is looked up. It is set from
 * the first packet of a DSR flow until its entry is in sy_dsr_flows, and from a FIN or RST until the next packet. */
#define DSR_PENDING_WORDS 4096
ARRAY(__u64, DSR_PENDING_WORDS) sy_dsr_pending SEC(".maps");

/* Fragmented datagram → its ports. */
LRU_HASH(struct fragment_key, struct fragment, 16384) sy_frags SEC(".maps");

/* Path MTU by address of a backend behind a tunnel. Only the agent adds keys, so ICMP errors can neither fill nor
 * poison the map. */
HASH(struct addr, struct pmtu, MAX_BACKENDS) sy_pmtu SEC(".maps");

/* Addresses of this node, where tunnels may end, and the broadcast addresses of its links. No packet comes from any of
 * them. 1: only lo has the address, so decapsulated packets may go there. */
HASH(struct addr, __u32, 65536) sy_local_addrs SEC(".maps");

/* Sources from which tunnel packets are accepted; frontend is 0. */
LPM_TRIE(struct allow_key, __u32, 16384) sy_tunnel_src SEC(".maps");

/* Keys of the tunnels between nodes. */
ARRAY(struct tunnel_keys, 1) sy_tunnel_keys SEC(".maps");

/* Destination of decapsulated packets → overhead of their tunnel in bytes. */
LRU_HASH(struct addr, __u32, 4096) sy_tunnel_hlen SEC(".maps");

/* Mark of a health check → its server. */
HASH(__u32, struct probe, MAX_BACKENDS) sy_probes SEC(".maps");

/* Rate limit of answers, per CPU, by enum answer_kind. */
PERCPU_ARRAY(struct token_bucket, 3) sy_answer_rate SEC(".maps");

/* Next hops from the kernel's routes, cached briefly, per CPU (route.h). */
#define NEXT_HOPS 4096
PERCPU_ARRAY(struct next_hop, NEXT_HOPS) sy_next_hops SEC(".maps");

/* Uplinks with XDP, by the low bits of their interface index. An array lookup costs a packet almost nothing. If another
 * uplink already has an uplink's element, tc handles the second one. */
#define UPLINKS 256
ARRAY(struct uplink, UPLINKS) sy_uplinks SEC(".maps");

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

#define COUNTERS(n) CHUNKED(PERCPU_ARRAY(struct traffic, COUNTER_CHUNK), (n) / COUNTER_CHUNK)

/* Traffic by frontend id. */
COUNTERS(MAX_FRONTENDS) sy_fe_counters SEC(".maps");

static __always_inline struct traffic *frontend_traffic(__u32 id)
{
	return CHUNK_LOOKUP(&sy_fe_counters, id, COUNTER_CHUNK);
}

/* Traffic by backend id. */
COUNTERS(MAX_BACKENDS) sy_be_counters SEC(".maps");

static __always_inline struct traffic *backend_traffic(__u32 id)
{
	return CHUNK_LOOKUP(&sy_be_counters, id, COUNTER_CHUNK);
}

/* Handshake times by backend id. The CPUs share it, because flows open rarely compared to packets. */
CHUNKED(ARRAY(struct handshakes, COUNTER_CHUNK), MAX_BACKENDS / COUNTER_CHUNK) sy_be_handshakes SEC(".maps");

/* Packets by action * REASON_MAX + reason. */
PERCPU_ARRAY(__u64, ACTION_MAX * REASON_MAX) sy_verdicts SEC(".maps");

/* NAT flows of TCP and SCTP whose client is confirmed. This is not an LRU map, because a flood must not evict flows.
 * Like all flow tables, it is sized by the loader. */
HASH(struct client_key, struct client_flow, 1024) sy_stream_clients SEC(".maps");

/* The other direction of the flows in sy_stream_clients. */
HASH(struct server_key, struct server_flow, 1024) sy_stream_servers SEC(".maps");

/* Clients' entries of half-open flows whose backend or source the hash does not determine. A lost entry costs the
 * client one retransmission. */
LRU_HASH(struct client_key, struct client_flow, 1024) sy_halfopen_clients SEC(".maps");

/* NAT flows of TCP and SCTP whose client is not confirmed, by server key. */
LRU_HASH(struct server_key, struct server_flow, 1024) sy_halfopen_servers SEC(".maps");

#define SNAT_HINTS 131072

/* What source ports are used for, by a hash of the server_key (snat.h). */
ARRAY(__u32, SNAT_HINTS) sy_snat_used SEC(".maps");

/* Hashes of half-open flows that do not use their first choice of a source (snat.h). */
ARRAY(__u32, SNAT_HINTS) sy_snat_later SEC(".maps");

/* NAT flows of UDP, in separate tables because datagrams prove nothing about their sender. This is not an LRU map,
 * because the port of a flow must not become free while an answer may still come. */
HASH(struct client_key, struct client_flow, 1024) sy_udp_clients SEC(".maps");

/* The other direction of the flows in sy_udp_clients. */
HASH(struct server_key, struct server_flow, 1024) sy_udp_servers SEC(".maps");

/* Number of UDP flows by frontend id, and the total. A frontend may have as many flows as entries are free, so k floods
 * leave one part in k + 1. The numbers are exact after each of the agent's walks. */
#define SHARE_ALL MAX_FRONTENDS
ARRAY(__u32, MAX_FRONTENDS + 1) sy_udp_share SEC(".maps");

/* Keys of flows in sy_stream_servers, used to find expired flows (reclaim.h). */
ARRAY(struct place_line, 1024) sy_stream_places SEC(".maps");

/* Keys of flows in sy_udp_servers, used to find expired flows (reclaim.h). */
ARRAY(struct place_line, 1024) sy_udp_places SEC(".maps");

/* Heartbeat of the agent's flow collection, by table: 0 for UDP, 1 for TCP and SCTP. */
ARRAY(struct collector, 2) sy_collector SEC(".maps");

/* Number of flows ever stored in a table, by table as in sy_collector. */
ARRAY(__u32, 2) sy_stored SEC(".maps");
