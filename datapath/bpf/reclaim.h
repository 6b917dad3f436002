/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/* Removal of NAT flows while no agent runs. A program cannot search a hash map for expired entries. So each flow has a
 * place in an array, which lists the key of its server entry and is found by the key's hash. Without an agent, a packet
 * that stores a flow removes ended and expired flows from its lines of places. While an agent runs and the table is
 * less than half full, flows get no place. This costs nothing, and always leaves half of the table for flows with a
 * place. */
#pragma once
#include "account.h"
#include "scratch.h"

/* Number of lines in which a flow may have its place, according to its hash, and of lines searched when the table is
 * full. */
#define PLACE_LINES 8

static __always_inline long flow_delete_client(const struct client_key *k, int stream)
{
	return stream ? bpf_map_delete_elem(&sy_stream_clients, k) : bpf_map_delete_elem(&sy_udp_clients, k);
}

static __always_inline long flow_delete_server(const struct server_key *k, int stream)
{
	return stream ? bpf_map_delete_elem(&sy_stream_servers, k) : bpf_map_delete_elem(&sy_udp_servers, k);
}

/* flow_remove removes the flow with a server key. It keeps the client's entry if the entry belongs to another flow. The
 * client may have opened one from the same port, which uses the same source port to another server. It is not inlined,
 * so its stack is in use only while it runs. */
static __noinline void flow_remove(const struct server_key *k, int stream)
{
	struct server_flow *s = flow_find_server(k, stream);
	__u32 frontend;

	if (!s)
		return;
	{
		struct client_key client = s->client;
		__u32 backend = s->backend;
		struct client_flow *c = flow_find_client(&client, stream);

		if (c && c->backend == backend && c->sport == k->dport && c->dport == k->sport &&
		    addr_equal(c->source.w, k->to.w))
			flow_delete_client(&client, stream);
		frontend = client.frontend;
	}
	if (!flow_delete_server(k, stream) && !stream)
		share_add(&sy_udp_share, frontend, -1);
}

static __always_inline struct place_line *place_line(int stream, __u32 i)
{
	return stream ? bpf_map_lookup_elem(&sy_stream_places, &i) : bpf_map_lookup_elem(&sy_udp_places, &i);
}

static __always_inline __u32 place_lines(int stream)
{
	return stream ? stream_place_lines : udp_place_lines;
}

/* place_is_free reports whether a place is free. It first removes a flow there that has ended or expired. */
__noinline int place_is_free(__u32 stream, __u32 line, __u32 way, __u32 now)
{
	struct place_line *l = place_line(stream, line);

	if (!l || way >= PLACE_WAYS)
		return 0;
	struct server_key k = l->keys[way];
	struct server_flow *s = k.server ? flow_find_server(&k, stream) : 0;

	if (!s)
		return 1;
	if (!flow_server_expired(s, stream, now))
		return 0;
	if (s->f.state != FLOW_CLOSED)
		backend_load_add(s->backend, -1);
	flow_remove(&k, stream);
	return 1;
}

/* place_reclaim removes a line's ended and expired flows, and returns a free place as 1 to PLACE_WAYS, or 0. */
static __always_inline int place_reclaim(__u32 stream, __u32 line, __u32 now)
{
	int place = 0;

#pragma clang loop unroll(full)
	for (int i = 0; i < PLACE_WAYS; i++)
		if (place_is_free(stream, line, i, now))
			place = i + 1;
	return place;
}

/* place_take gives the flow of v->server a place. It returns 0 if other flows have all its places. */
__noinline int place_take(__u32 stream)
{
	struct scratch *scratch = scratch_get();

	if (!scratch)
		return 0;
	const struct server_key *k = &scratch->v.server;
	__u32 place = 0, line = 0;
	__u64 sum = hash_pair(k->to.w[3] ^ k->server, k->to.w[1], 0) + hash_pair(k->dport, k->sport, 2);

#pragma clang loop unroll(full)
	for (int i = 0; i < PLACE_LINES; i++) {
		line = (__u64)hash_finish(sum + i) * place_lines(stream) >> 32;
		place = place_reclaim(stream, line, scratch->v.now);
		if (place)
			break;
	}
	struct place_line *l = place_line(stream, line);

	if (!l || !place || place > PLACE_WAYS)
		return 0;
	l->keys[place - 1] = *k;
	return 1;
}

/* place_search removes ended and expired flows from random lines. */
__noinline int place_search(__u32 stream, __u32 now)
{
	__u32 lines = place_lines(stream);

	if (!lines)
		return 0;
#pragma clang loop unroll(full)
	for (int i = 0; i < PLACE_LINES; i++)
		place_reclaim(stream, bpf_get_prandom_u32() % lines, now);
	return 0;
}

/* place_prepare gives a place, if needed, to a flow that is about to be stored. It returns 0 if the flow must not be
 * stored, because without an agent it would remain forever. */
static __always_inline int place_prepare(int stream, __u32 now)
{
	__u32 i = stream;
	struct collector *c = bpf_map_lookup_elem(&sy_collector, &i);
	__u32 *stored = bpf_map_lookup_elem(&sy_stored, &i);

	if (!c || !stored)
		return 0;
	__sync_fetch_and_add(stored, 1);
	if (collector_is_away(c, now))
		return place_take(stream);
	if ((__s32)(*stored - c->place_from) > 0)
		place_take(stream);
	return 1;
}
