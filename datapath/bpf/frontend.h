/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/* Frontend lookup and the choice of a backend for a new flow. */
#pragma once
#include "config.h"
#include "maps.h"
#include "parse.h"

static __always_inline __u32 hash_mix(__u32 h, __u32 w)
{
	h ^= w * 0xcc9e2d51;
	h = (h << 13) | (h >> 19);
	return h * 5 + 0xe6546b64;
}

/* hash_finish is the finaliser of MurmurHash3: each input bit affects each output bit. */
static __always_inline __u32 hash_finish(__u32 h)
{
	h = (h ^ h >> 16) * 0x85ebca6b;
	h = (h ^ h >> 13) * 0xc2b2ae35;
	return h ^ h >> 16;
}

/* flow_hash is the same on every balancer, so that a flow rerouted by a router keeps its backend. */
static __always_inline __u32 flow_hash(const struct flow_key *k, __u8 algorithm)
{
	const __u32 *w = (const __u32 *)k;
	int words = algorithm == ALGORITHM_SOURCE_HASH ? 4 : sizeof(*k) / 4;
	__u32 h = 0x9747b28c;

	for (int i = 0; i < (int)(sizeof(*k) / 4); i++)
		if (i < words)
			h = hash_mix(h, w[i]);
	return hash_finish(h);
}

static __always_inline __u32 rr_counter(__u32 frontend)
{
	__u32 *n = bpf_map_lookup_elem(&sy_rr_counter, &frontend);

	return n ? *n : 0;
}

/* frontend_lookup returns the frontend of a packet. A single port takes precedence over a range. */
static __always_inline struct frontend *frontend_lookup(const struct flow_key *k, __u8 decap)
{
	struct frontend_key key = { .vip = k->t.dst, .port = k->t.dport, .proto = k->proto, .decap = decap };
	struct frontend *fe = bpf_map_lookup_elem(&sy_frontends, &key);

	if (fe || decap)
		return fe;
	struct vip *vip = bpf_map_lookup_elem(&sy_vips, &k->t.dst);

	if (!vip || !vip->ranges)
		return 0;
	struct range_key r = {
		.prefix = RANGE_BITS + 16, .vip = k->t.dst, .proto = bpf_htons(k->proto), .port = k->t.dport
	};

	return bpf_map_lookup_elem(&sy_port_ranges, &r);
}

static __always_inline int frontend_allows(const struct frontend *fe, const struct addr *source)
{
	struct allow_key k = { .prefix = 32 + 128, .frontend = bpf_htonl(fe->id), .source = *source };

	return !fe->restricted || bpf_map_lookup_elem(&sy_src_allow, &k);
}

static __always_inline struct slot *table_slot(void *table, __u32 slots, __u32 h)
{
	__u32 i = 1 + h % slots;

	return bpf_map_lookup_elem(table, &i);
}

/* backend_more_loaded reports whether a has more flows per weight than b. A backend without a weight is draining. */
static __always_inline int backend_more_loaded(__u32 frontend, __u32 a, __u32 b)
{
	struct member_key ka = { frontend, a }, kb = { frontend, b };
	__u32 *wa = bpf_map_lookup_elem(&sy_weights, &ka), *wb = bpf_map_lookup_elem(&sy_weights, &kb);
	__u32 *la = bpf_map_lookup_elem(&sy_backend_load, &a), *lb = bpf_map_lookup_elem(&sy_backend_load, &b);

	if (!wa || !wb || !la || !lb)
		return 0;
	return (__u64)(*la + 1) * *wb > (__u64)(*lb + 1) * *wa;
}

/* Slots compared. Two are enough for many servers (Mitzenmacher, 2001), but one may be drawn twice. */
#define LEAST_CONN_SAMPLES 8

static __always_inline struct slot *table_least_conn(void *table, __u32 slots, __u32 frontend)
{
	struct slot *best = table_slot(table, slots, bpf_get_prandom_u32());

	for (int i = 1; best && i < LEAST_CONN_SAMPLES; i++) {
		struct slot *s = table_slot(table, slots, bpf_get_prandom_u32());

		if (s && s->backend != best->backend && backend_more_loaded(frontend, best->backend, s->backend))
			best = s;
	}
	return best;
}

/* table_lookup returns the table of a frontend and its header; NULL when it has no slots. */
static __always_inline struct table_header *table_lookup(const struct frontend *fe, void **table)
{
	__u32 key = fe->id, zero = 0;

	*table = bpf_map_lookup_elem(&sy_tables, &key);
	if (!*table)
		return 0;
	struct table_header *header = bpf_map_lookup_elem(*table, &zero);

	return header && header->slots ? header : 0;
}

/* table_select returns the slot for a new flow; NULL when there is none. */
static __always_inline struct slot *table_select(const struct frontend *fe, const struct flow_key *k)
{
	void *table;
	struct table_header *header = table_lookup(fe, &table);

	if (!header)
		return 0;
	__u32 slots = header->slots;

	switch (fe->algorithm) {
	case ALGORITHM_RANDOM:
		return table_slot(table, slots, bpf_get_prandom_u32());
	case ALGORITHM_ROUND_ROBIN:
		return table_slot(table, slots, rr_counter(fe->id));
	case ALGORITHM_LEAST_CONN:
		return table_least_conn(table, slots, fe->id);
	}
	return table_slot(table, slots, flow_hash(k, fe->algorithm));
}

/* affinity_lookup returns the last backend of a client if it still accepts new flows, otherwise NO_BACKEND. */
static __always_inline __u32 affinity_lookup(const struct frontend *fe, const struct addr *client, __u64 now)
{
	struct affinity_key k = { .client = *client, .frontend = fe->id };
	struct affinity *a = bpf_map_lookup_elem(&sy_affinity, &k);

	if (!a || now - a->seen > fe->affinity * SECOND)
		return NO_BACKEND;
	struct member_key m = { fe->id, a->backend };

	return bpf_map_lookup_elem(&sy_weights, &m) ? a->backend : NO_BACKEND;
}
