/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/* Which backend a new flow goes to. */
#pragma once
#include "maps.h"

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

/* choose returns the backend for a new flow, and its id; NULL when there is none. */
static __always_inline struct backend *choose(const struct frontend *fe, const struct flow_key *k, __u32 *id)
{
	__u32 key = fe->id, zero = 0, h;
	void *table = bpf_map_lookup_elem(&tables, &key);

	if (!table)
		return 0;
	__u32 *slots = bpf_map_lookup_elem(table, &zero);

	if (!slots || !*slots)
		return 0;
	if (fe->spread == SPREAD_RANDOM)
		h = bpf_get_prandom_u32();
	else if (fe->spread == SPREAD_TURNS)
		h = turn(fe->id);
	else
		h = hash(k, fe->spread);
	__u32 slot = 1 + h % *slots;
	__u32 *b = bpf_map_lookup_elem(table, &slot);

	if (!b)
		return 0;
	*id = *b;
	return bpf_map_lookup_elem(&backends, id);
}
