/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/* commit, for a new NAT flow: claim a source address and port, and write both directions. */
#pragma once
#include "decide.h"

#define SNAT_TRIES 32
#define SNAT_EVICT_AFTER 8 /* tries before the port of another flow may be taken */

/* flow_delete removes both directions of a flow, given the key of one. */
static __always_inline void flow_delete(const struct flow_key *k)
{
	struct flow *f = bpf_map_lookup_elem(&sy_flows, k);

	if (!f)
		return;
	struct flow_key other = flow_reverse_key(f, k->proto);

	bpf_map_delete_elem(&sy_flows, &other);
	bpf_map_delete_elem(&sy_flows, k);
}

/* flow_evict removes a half-open flow, given the key of its reply direction. Otherwise a flood could hold all
 * ports; a real client sends again. */
static __always_inline void flow_evict(const struct flow_key *k)
{
	struct flow *r = bpf_map_lookup_elem(&sy_halfopen, k), *f;

	if (!r)
		return;
	struct flow_key client = flow_reverse_key(r, k->proto);

	f = bpf_map_lookup_elem(&sy_halfopen, &client);
	if (f && f->t.sport == k->t.dport)
		bpf_map_delete_elem(&sy_halfopen, &client);
	bpf_map_delete_elem(&sy_halfopen, k);
}

/* snat_claim_port writes the reply direction of a new flow under k, unless a flow that may not be evicted has it. */
static __always_inline int snat_claim_port(const struct flow_key *k, const struct flow *reply, int polite)
{
	if (!polite)
		flow_evict(k);
	if (bpf_map_update_elem(&sy_halfopen, k, reply, BPF_NOEXIST))
		return 0;
	struct flow *f = bpf_map_lookup_elem(&sy_flows, k);

	if (!f)
		return 1;
	if (!polite && f->state == FLOW_CLOSED) {
		flow_delete(k);
		return 1;
	}
	bpf_map_delete_elem(&sy_halfopen, k);
	return 0;
}

/* snat_source sets the source that the backend receives at the n-th try: one of the SNAT addresses and a port. For a
 * backend on this node it is the client; only the port changes, and only when the client has another flow to the
 * backend (by another VIP) from it. */
static __always_inline void snat_source(struct flow_key *k, const struct pkt *p, const struct verdict *v,
					const struct backend *b, __u32 start, __u32 n)
{
	__u32 range = (__u32)snat_last - snat_first + 1;

	/* 7919 is coprime to any range below it and spreads the tries over larger ranges. */
	k->t.dport = bpf_htons(snat_first + (start + n * 7919) % range);
	if (v->local) {
		if (!n)
			k->t.dport = p->key.t.sport;
		return;
	}
	const struct addr *ours = &b->snat[(start + n) & (SNAT_ADDRS - 1)];

	k->t.dst = addr_is_zero(ours) ? b->snat[0] : *ours;
}

/* flow_is_older reports whether the half-open flow with the reply key k was last seen before *best, and then sets
 * *best to that time. */
static __always_inline int flow_is_older(const struct flow_key *k, __u64 *best)
{
	struct flow *r = bpf_map_lookup_elem(&sy_halfopen, k);

	if (!r || r->seen >= *best)
		return 0;
	*best = r->seen;
	return 1;
}

/* flow_open_nat claims a source address and port that no flow to this backend has, and writes both directions. */
static __always_inline void flow_open_nat(const struct pkt *p, struct verdict *v, __u64 now)
{
	struct flow reply = { .t = tuple_reverse(&p->key.t),
			      .frontend = v->frontend,
			      .backend = v->backend,
			      .local = v->local,
			      .state = FLOW_HALF_OPEN,
			      .reply = 1,
			      .seen = now };
	struct flow_key k = { .t = tuple_reverse(&v->t), .proto = p->key.proto };
	struct backend *b = backend_get(v->backend);
	__u32 start = bpf_get_prandom_u32();

	__u32 oldest = SNAT_EVICT_AFTER;
	__u64 seen = ~0ULL;

	flow_delete(&p->key); /* a closed flow with the same key */
	for (__u32 i = 0; i < SNAT_TRIES && b; i++) {
		/* Evict the oldest of the tried ones: in a flood a real client then has time to confirm. */
		snat_source(&k, p, v, b, start, i == SNAT_EVICT_AFTER ? oldest : i);
		if (!snat_claim_port(&k, &reply, i < SNAT_EVICT_AFTER)) {
			if (i < SNAT_EVICT_AFTER && flow_is_older(&k, &seen))
				oldest = i;
			continue;
		}
		v->t = tuple_reverse(&k.t);
		struct flow f = { .t = v->t,
				  .frontend = v->frontend,
				  .backend = v->backend,
				  .local = v->local,
				  .state = FLOW_HALF_OPEN,
				  .seen = now };

		if (bpf_map_update_elem(&sy_halfopen, &p->key, &f, BPF_ANY))
			verdict_drop(v, REASON_INTERNAL_ERROR);
		return;
	}
	verdict_drop(v, REASON_SNAT_EXHAUSTED);
}
