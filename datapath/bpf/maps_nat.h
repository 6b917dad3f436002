/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/* Maps of NAT flows; part of maps.h. */
#pragma once

/* NAT flows of TCP and SCTP whose client is confirmed. This is not an LRU map, because a flood must not evict flows.
 * Like all flow tables, it is sized by the loader. */
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, struct client_key);
	__type(value, struct client_flow);
	__uint(max_entries, 1024);
} sy_stream_clients SEC(".maps");

/* The other direction of the flows in sy_stream_clients. */
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, struct server_key);
	__type(value, struct server_flow);
	__uint(max_entries, 1024);
} sy_stream_servers SEC(".maps");

/* Clients' entries of half-open flows whose backend or source the hash does not determine. A lost entry costs the
 * client one retransmission. */
struct {
	__uint(type, BPF_MAP_TYPE_LRU_HASH);
	__type(key, struct client_key);
	__type(value, struct client_flow);
	__uint(max_entries, 1024);
} sy_halfopen_clients SEC(".maps");

/* NAT flows of TCP and SCTP whose client is not confirmed, by server key. */
struct {
	__uint(type, BPF_MAP_TYPE_LRU_HASH);
	__type(key, struct server_key);
	__type(value, struct server_flow);
	__uint(max_entries, 1024);
} sy_halfopen_servers SEC(".maps");

#define SNAT_HINTS 131072

/* What source ports are used for, by a hash of the server_key (snat.h). */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__type(key, __u32);
	__type(value, __u32);
	__uint(max_entries, SNAT_HINTS);
} sy_snat_used SEC(".maps");

/* Hashes of half-open flows that do not use their first choice of a source (snat.h). */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__type(key, __u32);
	__type(value, __u32);
	__uint(max_entries, SNAT_HINTS);
} sy_snat_later SEC(".maps");

/* NAT flows of UDP, in separate tables because datagrams prove nothing about their sender. This is not an LRU map,
 * because the port of a flow must not become free while an answer may still come. */
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, struct client_key);
	__type(value, struct client_flow);
	__uint(max_entries, 1024);
} sy_udp_clients SEC(".maps");

/* The other direction of the flows in sy_udp_clients. */
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, struct server_key);
	__type(value, struct server_flow);
	__uint(max_entries, 1024);
} sy_udp_servers SEC(".maps");

/* Number of UDP flows by frontend id, and the total. A frontend may have as many flows as entries are free, so k floods
 * leave one part in k + 1. The numbers are exact after each of the agent's walks. */
#define SHARE_ALL MAX_FRONTENDS
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__type(key, __u32);
	__type(value, __u32);
	__uint(max_entries, MAX_FRONTENDS + 1);
} sy_udp_share SEC(".maps");

/* Keys of flows in sy_stream_servers, used to find expired flows (reclaim.h). */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__type(key, __u32);
	__type(value, struct place_line);
	__uint(max_entries, 1024);
} sy_stream_places SEC(".maps");

/* Keys of flows in sy_udp_servers, used to find expired flows (reclaim.h). */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__type(key, __u32);
	__type(value, struct place_line);
	__uint(max_entries, 1024);
} sy_udp_places SEC(".maps");

/* Heartbeat of the agent's flow collection, by table: 0 for UDP, 1 for TCP and SCTP. */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__type(key, __u32);
	__type(value, struct collector);
	__uint(max_entries, 2);
} sy_collector SEC(".maps");

/* Number of flows ever stored in a table, by table as in sy_collector. */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__type(key, __u32);
	__type(value, __u32);
	__uint(max_entries, 2);
} sy_stored SEC(".maps");
