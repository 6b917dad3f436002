/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/* Removal of NAT flows while no agent runs. A program cannot search a hash map for entries that
 * have expired. So each flow has a place in an array, by the hash of its server's key, that lists
 * the key. Without an agent, a packet that stores a flow removes flows that have ended or expired
 * from its lines of places. With an agent, flows get no place while the table is less than half
 * full: this costs nothing, and half of the table always remains for flows with a place. */
#pragma once
#include "account.h"
#include "scratch.h"

/* Lines in which a flow may have its place, as its hash
 * determines, and lines searched when the table is full. */
#define PLACE_LINES 8

static __always_inline long flow_delete_client(const struct client_key *k, int stream)
{
	return stream ? bpf_map_delete_elem(&sy_stream_clients, k) : bpf_map_delete_elem(&sy_udp_clients, k);
}

static __always_inline long flow_delete_server(const struct server_key *k, int stream)
{
	return stream ? bpf_map_delete_elem(&sy_stream_servers, k) : bpf_map_delete_elem(&sy_udp_servers, k);
}

/* udp_share_add changes the UDP flow counts of a frontend and of all frontends by n. */
static __always_inline void udp_share_add(__u32 frontend, int n)
{
	share_add(&sy_udp_share, frontend, n);
}

/* flow_remove removes the flow that has the key of a server. The client's entry remains if it
 * belongs to another flow: the client may have opened one from the same port, and to another
 * server it has the same source port. It is a separate function because of its stack. */
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
		udp_share_add(frontend, -1);
}

static __always_inline struct place_line *place_line(int stream, __u32 i)
{
	return stream ? bpf_map_lookup_elem(&sy_stream_places, &i) : bpf_map_lookup_elem(&sy_udp_places, &i);
}

static __always_inline __u32 place_lines(int stream)
{
	return stream ? stream_place_lines : udp_place_lines;
}

/* place_is_free reports whether a place is empty. It first removes a flow that has ended or expired. */
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

/* place_reclaim removes the flows of a line that have ended or expired, and returns a free place as 1 to PLACE_WAYS, or
 * 0. */
static __always_inline int place_reclaim(__u32 stream, __u32 line, __u32 now)
{
	int place = 0;

#pragma clang loop unroll(full)
	for (int i = 0; i < PLACE_WAYS; i++)
		if (place_is_free(stream, line, i, now))
			place = i + 1;
	return place;
}

/* place_take gives the flow of v->server a place. It returns 0 if other flows have them all. */
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

/* place_search removes flows that have ended or expired from random lines. */
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

/* place_prepare gives a flow that is about to be stored a place if it needs one. It returns
 * 0 if the flow cannot be stored, because without an agent it would remain forever. */
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
