/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/* Which backend a new flow goes to. */
#pragma once
#include "config.h"
#include "maps.h"
#include "parse.h"

static __always_inline __u32 mix(__u32 h, __u32 w)
{
	h ^= w * 0xcc9e2d51;
	h = (h << 13) | (h >> 19);
	return h * 5 + 0xe6546b64;
}

/* finish makes every bit depend on every other (MurmurHash3's finaliser). */
static __always_inline __u32 finish(__u32 h)
{
	h = (h ^ h >> 16) * 0x85ebca6b;
	h = (h ^ h >> 13) * 0xc2b2ae35;
	return h ^ h >> 16;
}

/* hash is the same on every balancer, so that a flow which a router moves lands on the same backend. */
static __always_inline __u32 hash(const struct flow_key *k, __u8 spread)
{
	const __u32 *w = (const __u32 *)k;
	int words = spread == SPREAD_SOURCE ? 4 : sizeof(*k) / 4;
	__u32 h = 0x9747b28c;

	for (int i = 0; i < (int)(sizeof(*k) / 4); i++)
		if (i < words)
			h = mix(h, w[i]);
	return finish(h);
}

static __always_inline __u32 turn(__u32 frontend)
{
	__u32 *n = bpf_map_lookup_elem(&turns, &frontend);

	return n ? *n : 0;
}

/* frontend_of returns the frontend that a packet is for. Single ports go before ranges. */
static __always_inline struct frontend *frontend_of(const struct flow_key *k, __u8 inside)
{
	struct frontend_key key = { .vip = k->t.dst, .port = k->t.dport, .proto = k->proto, .inside = inside };
	struct frontend *fe = bpf_map_lookup_elem(&frontends, &key);

	if (fe || inside)
		return fe;
	struct vip *vip = bpf_map_lookup_elem(&vips, &k->t.dst);

	if (!vip || !vip->ranges)
		return 0;
	struct range_key r = { .prefix = RANGE_BITS + 16, .vip = k->t.dst, .proto = bpf_htons(k->proto), .port = k->t.dport };

	return bpf_map_lookup_elem(&ranges, &r);
}

static __always_inline int allowed_from(const struct frontend *fe, const struct addr *source)
{
	struct allow_key k = { .prefix = 32 + 128, .frontend = bpf_htonl(fe->id), .source = *source };

	return !fe->restricted || bpf_map_lookup_elem(&allowed, &k);
}

static __always_inline struct slot *slot_at(void *table, __u32 slots, __u32 h)
{
	__u32 i = 1 + h % slots;

	return bpf_map_lookup_elem(table, &i);
}

/* heavier reports whether a has more flows for its weight than b. A backend without a weight is only leaving. */
static __always_inline int heavier(__u32 frontend, __u32 a, __u32 b)
{
	struct member_key ka = { frontend, a }, kb = { frontend, b };
	__u32 *wa = bpf_map_lookup_elem(&members, &ka), *wb = bpf_map_lookup_elem(&members, &kb);
	__u32 *la = bpf_map_lookup_elem(&load, &a), *lb = bpf_map_lookup_elem(&load, &b);

	if (!wa || !wb || !la || !lb)
		return 0;
	return (__u64)(*la + 1) * *wb > (__u64)(*lb + 1) * *wa;
}

#define LEAST_OF 8 /* slots that are compared: two do for many servers (Mitzenmacher, 2001), but the same may come up */

static __always_inline struct slot *least(void *table, __u32 slots, __u32 frontend)
{
	struct slot *best = slot_at(table, slots, bpf_get_prandom_u32());

	for (int i = 1; best && i < LEAST_OF; i++) {
		struct slot *s = slot_at(table, slots, bpf_get_prandom_u32());

		if (s && s->backend != best->backend && heavier(frontend, best->backend, s->backend))
			best = s;
	}
	return best;
}

/* table_of returns the table of a frontend and its head; NULL when it has no slots. */
static __always_inline struct slot *table_of(const struct frontend *fe, void **table)
{
	__u32 key = fe->id, zero = 0;

	*table = bpf_map_lookup_elem(&tables, &key);
	if (!*table)
		return 0;
	struct slot *head = bpf_map_lookup_elem(*table, &zero);

	return head && head->backend ? head : 0;
}

/* choose returns the slot for a new flow; NULL when there is none. */
static __always_inline struct slot *choose(const struct frontend *fe, const struct flow_key *k)
{
	void *table;
	struct slot *head = table_of(fe, &table);

	if (!head)
		return 0;
	__u32 slots = head->backend;

	switch (fe->spread) {
	case SPREAD_RANDOM:
		return slot_at(table, slots, bpf_get_prandom_u32());
	case SPREAD_TURNS:
		return slot_at(table, slots, turn(fe->id));
	case SPREAD_LEAST:
		return least(table, slots, fe->id);
	}
	return slot_at(table, slots, hash(k, fe->spread));
}

/* remembered returns the backend that a client has had lately, if it still takes new flows; else NO_BACKEND. */
static __always_inline __u32 remembered(const struct frontend *fe, const struct addr *client, __u64 now)
{
	struct affinity_key k = { .client = *client, .frontend = fe->id };
	struct affinity *a = bpf_map_lookup_elem(&affinities, &k);

	if (!a || now - a->seen > fe->affinity * SECOND)
		return NO_BACKEND;
	struct member_key m = { fe->id, a->backend };

	return bpf_map_lookup_elem(&members, &m) ? a->backend : NO_BACKEND;
}
