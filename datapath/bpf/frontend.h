/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/* Frontend lookup, and the selection of a backend for a new flow. */
#pragma once
#include "clock.h"
#include "config.h"
#include "maps.h"
#include "parse.h"

/* hash_finish mixes a sum of products and returns 32 bits. */
static __always_inline __u32 hash_finish(__u64 h)
{
	h = (h ^ h >> 32) * 0x9e3779b97f4a7c15ULL;
	return h >> 32;
}

static __always_inline __u64 hash_pair(__u32 a, __u32 b, int i)
{
	return (__u64)(a + hash_keys[i]) * (b + hash_keys[i + 1]);
}

/* flow_hash is the same on every balancer, so a flow keeps its backend when a router moves it to another one. It is NH
 * (UMAC, Black et al., CRYPTO 1999): without the keys nobody can choose flows that collide. */
static __always_inline __u32 flow_hash(const struct flow_key *k, __u8 algorithm)
{
	const __u32 *s = k->t.src.w, *d = k->t.dst.w;
	__u32 ports = (__u32)k->t.sport << 16 | k->t.dport;
	int v4 = addr_is_v4(&k->t.src);
	__u64 h = v4 ? hash_pair(s[3], 0, 0) : hash_pair(s[3], s[0], 0) + hash_pair(s[1], s[2], 2);

	if (algorithm == ALGORITHM_SOURCE_HASH)
		return hash_finish(h);
	h += hash_pair(ports, k->proto, 4) + (v4 ? hash_pair(d[3], 0, 6) : hash_pair(d[3], d[0], 6));
	if (!v4)
		h += hash_pair(d[1], d[2], 8);
	return hash_finish(h);
}

/* addr_kinds returns what an address may be (enum addr_kind), or 0 if it is certainly none of these. */
static __always_inline __u8 addr_kinds(const struct addr *a)
{
	__u64 h = hash_pair(a->w[3], a->w[0], 0) + (addr_is_v4(a) ? 0 : hash_pair(a->w[1], a->w[2], 2));
	__u32 n = h >> 32, i = n / 16 % ADDR_FILTER_WORDS;
	__u64 *word = bpf_map_lookup_elem(&sy_addr_filter, &i);

	return word ? *word >> n % 16 * 4 & 15 : 0;
}

/* frontend_lookup returns a packet's frontend. A single port takes precedence over a range. */
static __always_inline struct frontend *frontend_lookup(const struct flow_key *k, __u8 decap)
{
	struct frontend_key key = { .vip = k->t.dst, .port = k->t.dport, .proto = k->proto, .decap = decap };
	struct frontend *fe = bpf_map_lookup_elem(&sy_frontends, &key);

	if (fe)
		return fe;
	struct vip *vip = bpf_map_lookup_elem(&sy_vips, &k->t.dst);

	if (!vip || !vip->ranges)
		return 0;
	struct range_key r = {
		.prefix = RANGE_BITS + 16, .vip = k->t.dst, .proto = bpf_htons(decap << 8 | k->proto), .port = k->t.dport
	};

	return bpf_map_lookup_elem(&sy_port_ranges, &r);
}

static __always_inline int frontend_allows(const struct frontend *fe, const struct addr *source)
{
	struct allow_key k = { .prefix = 32 + 128, .frontend = bpf_htonl(fe->id), .source = *source };

	return !fe->restricted || bpf_map_lookup_elem(&sy_src_allow, &k);
}

/* backend_port returns the port of a backend for a packet to a frontend, which may be a range. */
static __always_inline __be16 backend_port(const struct backend *b, const struct frontend *fe, __be16 dport)
{
	return bpf_htons(bpf_ntohs(b->port) + bpf_ntohs(dport) - bpf_ntohs(fe->first_port));
}

static __always_inline __u32 slot_word(__u32 i)
{
	struct slot_line *line = CHUNK_LOOKUP(&sy_slots, i / LINE_WORDS, SLOT_CHUNK / LINE_WORDS);

	return line ? line->words[i % LINE_WORDS] : NO_BACKEND;
}

/* table_index maps a hash to a slot with a multiplication instead of a division (Lemire, 2019). */
static __always_inline __u32 table_index(const struct table *t, __u32 h)
{
	return (__u64)h * t->slots >> 32;
}

/* table_older_hash returns the hash for the slot in the older table, given h, the hash for the current table. */
static __always_inline __u32 table_older_hash(const struct frontend *fe, const struct flow_key *k, __u32 h)
{
	return fe->older_algorithm ? flow_hash(k, fe->older_algorithm) : h;
}

static __always_inline __u32 table_slot(const struct table *t, __u32 index)
{
	return t->slots ? slot_word(t->first + index) : NO_BACKEND;
}

/* table_previous returns the i-th previous backend of a changed slot. */
static __always_inline __u32 table_previous(const struct table *t, __u32 index, __u32 i)
{
	return t->previous ? slot_word(t->previous + index * PREVIOUS_MAX + i) : NO_BACKEND;
}

static __always_inline __u32 slot_backend(__u32 word)
{
	return word & ~SLOT_CHANGED;
}

/* table_clock returns the uptime in units of 0.54 s. */
static __always_inline __u16 table_clock(void)
{
	return bpf_ktime_get_coarse_ns() >> 29;
}

/* table_is_new reports whether a slot changed at most 1.1 s ago. The clock wraps after 9.8 hours. Then an old change
 * looks new for another 1.1 s. */
static __always_inline int table_is_new(const struct frontend *fe)
{
	return (__u16)(table_clock() - fe->changed) <= 1;
}

/* table_before returns the latest previous backend of a changed slot, or NO_BACKEND. */
static __always_inline __u32 table_before(const struct frontend *fe, const struct flow_key *k, __u32 h)
{
	__u32 id = table_previous(&fe->table, table_index(&fe->table, h), 0);

	if (id != ANY_BACKEND)
		return id;
	return slot_backend(table_slot(&fe->older, table_index(&fe->older, table_older_hash(fe, k, h))));
}

static __always_inline __u32 member_weight(__u32 member)
{
	return member & ((1 << MEMBER_WEIGHT_BITS) - 1);
}

/* member_epoch_now returns a member's epoch, or 0 if the backend is not a member. It is a global function because its
 * caller, commit, has little stack left. */
__noinline int member_epoch_now(__u32 frontend, __u32 backend)
{
	struct member_key k = { frontend, backend };
	__u32 *member = bpf_map_lookup_elem(&sy_weights, &k);

	return member ? *member >> MEMBER_WEIGHT_BITS : 0;
}

/* backend_more_loaded reports whether backend a has more flows per weight than b. A backend without weight is
 * draining. */
static __always_inline int backend_more_loaded(__u32 frontend, __u32 a, __u32 b)
{
	struct member_key ka = { frontend, a }, kb = { frontend, b };
	__u32 *wa = bpf_map_lookup_elem(&sy_weights, &ka), *wb = bpf_map_lookup_elem(&sy_weights, &kb);
	__u32 *la = bpf_map_lookup_elem(&sy_backend_load, &a), *lb = bpf_map_lookup_elem(&sy_backend_load, &b);

	if (!wa || !wb || !la || !lb)
		return 0;
	return (__u64)(*la + 1) * member_weight(*wb) > (__u64)(*lb + 1) * member_weight(*wa);
}

/* Number of slots to compare. Two are enough with many servers (Mitzenmacher, 2001), but one server may be drawn
 * twice. */
#define LEAST_CONN_SAMPLES 8

static __always_inline __u32 table_random(const struct table *t)
{
	return slot_backend(table_slot(t, table_index(t, bpf_get_prandom_u32())));
}

__noinline __u32 table_least_conn(const struct frontend *fe)
{
	if (!fe)
		return NO_BACKEND;
	__u32 best = table_random(&fe->table);

	for (int i = 1; i < LEAST_CONN_SAMPLES; i++) {
		__u32 b = table_random(&fe->table);

		if (b != best && backend_more_loaded(fe->id, best, b))
			best = b;
	}
	return best;
}

static __always_inline __u32 table_round_robin(const struct frontend *fe)
{
	struct traffic *t = frontend_traffic(fe->id);

	return t && fe->table.slots ? slot_backend(table_slot(&fe->table, (__u32)t->flows % fe->table.slots)) :
				      NO_BACKEND;
}

/* table_select returns the backend for a new flow with this hash, or NO_BACKEND. */
static __always_inline __u32 table_select(const struct frontend *fe, const struct flow_key *k, __u32 hash)
{
	switch (fe->algorithm) {
	case ALGORITHM_RANDOM:
		return table_random(&fe->table);
	case ALGORITHM_ROUND_ROBIN:
		return table_round_robin(fe);
	case ALGORITHM_LEAST_CONN:
		return table_least_conn(fe);
	case ALGORITHM_SOURCE_HASH:
		hash = flow_hash(k, ALGORITHM_SOURCE_HASH);
	}
	return slot_backend(table_slot(&fe->table, table_index(&fe->table, hash)));
}

/* affinity_lookup returns a client's last backend if it still accepts new flows, and otherwise NO_BACKEND. */
static __always_inline __u32 affinity_lookup(const struct frontend *fe, const struct addr *client, __u64 now)
{
	struct affinity_key k = { .client = *client, .frontend = fe->id };
	struct affinity *a = bpf_map_lookup_elem(&sy_affinity, &k);

	if (!a || elapsed(a->seen, now) > fe->affinity * SECOND)
		return NO_BACKEND;
	struct member_key m = { fe->id, a->backend };
	__u32 *member = bpf_map_lookup_elem(&sy_weights, &m);

	return member && *member >> MEMBER_WEIGHT_BITS == a->epoch ? a->backend : NO_BACKEND;
}
