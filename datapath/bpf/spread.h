/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/* decide, for chained frontends, which several nodes serve together. The node that receives a packet finds the
 * delivering node by the flow hash, and stores nothing. The delivering node stores the flow. It relays a packet of an
 * unknown flow to the previous nodes of the slot (Faild and Beamer, both NSDI 2018). The packet carries the list of
 * these nodes, and the list only shrinks, so there are no loops. */
#pragma once
#include "dsr.h"

#define RELAYS 65536

/* UDP flows that this node did not know and relayed to the previous nodes of their slot. An entry is removed if none of
 * these nodes knows the flow either. After timeout_udp, slots forget their previous nodes, and only these entries
 * remain. So live flows are still relayed, and new ones ask no other node. */
HASH(struct flow_key, struct relay, RELAYS) sy_relays SEC(".maps");

/* Number of entries in sy_relays by frontend id, and the total. A frontend may have as many as are free, so a flooded
 * frontend leaves entries for others. The numbers are exact after each of the agent's walks. */
ARRAY(__u32, MAX_FRONTENDS + 1) sy_relay_share SEC(".maps");

/* spread_append adds a node to the list. The first one becomes the destination. */
static __always_inline void spread_append(struct verdict *v, const struct addr *a)
{
	__u32 n = v->chain.n;

	asm volatile("" : "+r"(n)); /* the value that is checked must be the one that is used */
	if (addr_is_zero(&v->t.dst)) {
		v->t.dst = *a;
		return;
	}
	if (n >= CHAIN_MAX || addr_is_v4(a) != addr_is_v4(&v->t.dst)) /* a tunnel's addresses are of one family */
		return;
	v->chain.next[n] = *a;
	v->chain.n = n + 1;
}

/* spread_has_backends reports whether this node has a backend for new flows of a frontend. */
static __always_inline int spread_has_backends(const struct frontend *local)
{
	return local && local->table.slots;
}

enum {
	SLOT_IS_LOCAL = 1, /* this node delivers the packet */
	SLOT_WAS_LOCAL = 2, /* this node had the slot before and may have the flow */
};

/* spread_add_backend adds a node that may have the flow, or returns SLOT_WAS_LOCAL if it is this node. */
static __always_inline int spread_add_backend(struct verdict *v, __u32 id)
{
	struct backend *b = id == NO_BACKEND ? 0 : backend_get(id);

	if (!b)
		return 0;
	if (b->local)
		return SLOT_WAS_LOCAL;
	if (addr_is_zero(&v->t.dst))
		v->t.src = b->snat[0];
	spread_append(v, &b->addr);
	return 0;
}

/* spread_accepts reports whether a node accepts new flows of a frontend. It and spread_has_client are global functions,
 * which the verifier checks once and whose stack is in use only while they run. */
__noinline int spread_accepts(__u32 frontend, __u32 id)
{
	struct member_key m = { frontend, id };

	return bpf_map_lookup_elem(&sy_weights, &m) != 0;
}

/* spread_has_client reports whether affinity binds a packet's client to a backend of this node. */
__noinline int spread_has_client(struct frontend *local)
{
	struct scratch *s = scratch_get();

	if (!local || !s)
		return 0;
	return affinity_lookup(local, &s->p.key.t.src, bpf_ktime_get_coarse_ns()) != NO_BACKEND;
}

/* spread_add_earlier adds a previous node of a slot. For a new flow it adds only nodes that accept new flows, because
 * others may be down. It skips the slot's current node, which is already in the list and must not send the packet to
 * itself. */
static __always_inline int spread_add_earlier(struct verdict *v, const struct frontend *fe, __u32 id, int is_new)
{
	if (id == v->backend || (is_new && !spread_accepts(fe->id, id)))
		return 0;
	return spread_add_backend(v, id);
}

/* spread_add_older adds the nodes of the slot in the older table. */
static __always_inline int spread_add_older(const struct pkt *p, struct verdict *v, const struct frontend *fe, __u32 h,
					    int is_new)
{
	const struct table *older = &fe->older;
	__u32 i = table_index(older, table_older_hash(fe, &p->key, h)), slot = table_slot(older, i);
	int locality = spread_add_earlier(v, fe, slot_backend(slot), is_new);

	for (int j = 0; j < PREVIOUS_MAX - 1 && slot & SLOT_CHANGED; j++)
		locality |= spread_add_earlier(v, fe, table_previous(older, i, j), is_new);
	return locality;
}

/* spread_candidates adds the nodes that may have the flow: the slot's node and the previous ones. A new flow has only
 * the first. With affinity, previous nodes may know the client, unless they were selected by another algorithm, which
 * used no affinity. It returns this node's role. It is a global function, which the verifier checks once. */
__noinline int spread_candidates(struct frontend *fe, int is_new)
{
	struct scratch *scratch = scratch_get();

	if (!fe || !scratch)
		return 0;
	const struct pkt *p = &scratch->p;
	struct verdict *v = &scratch->v;
	__u32 h = fe->algorithm == ALGORITHM_FLOW_HASH ? v->hash : flow_hash(&p->key, fe->algorithm);
	__u32 i = table_index(&fe->table, h), slot = table_slot(&fe->table, i);
	int locality = 0;

	v->backend = slot_backend(slot);
	if (spread_add_backend(v, v->backend))
		locality = SLOT_IS_LOCAL;
	for (int j = 0; j < PREVIOUS_MAX && slot & SLOT_CHANGED && (!is_new || fe->affinity); j++) {
		__u32 id = table_previous(&fe->table, i, j);

		if (id == NO_BACKEND)
			break;
		if (id == ANY_BACKEND) {
			if (!is_new || !fe->older_algorithm)
				locality |= spread_add_older(p, v, fe, h, is_new);
			break;
		}
		locality |= spread_add_earlier(v, fe, id, is_new);
	}
	return locality;
}

/* spread_send sends a packet to the first node of the list. */
static __always_inline struct flow *spread_send(struct verdict *v)
{
	if (addr_is_zero(&v->t.src))
		return verdict_set(v, ACTION_DROP, REASON_NO_ROUTE);
	tunnel_set_ports(v);
	v->method = METHOD_GUE;
	v->keyed = 1;
	return verdict_set(v, ACTION_FORWARD, REASON_FORWARDED);
}

/* spread_append_self adds this node as the last one, to which the first packet of a flow returns. */
static __always_inline void spread_append_self(const struct pkt *p, struct verdict *v, const struct addr *self)
{
	spread_append(v, self);
	if (!pkt_is_stream(p))
		v->commit = COMMIT_RELAY;
}

/* spread_is_of_client reports whether a packet opens a flow for a client that affinity binds to a backend of this
 * node. */
static __always_inline int spread_is_of_client(const struct pkt *p, struct frontend *local)
{
	return local && local->affinity && pkt_opens_flow(p) && spread_has_client(local);
}

/* spread_follow relays a datagram of an unknown flow like the flow's previous datagrams, even after the slot has
 * forgotten the nodes. It returns 0 if there were none, or if the first node has left. */
static __always_inline int spread_follow(const struct pkt *p, struct verdict *v, const struct frontend *local,
					 const struct addr *self)
{
	struct relay *r = pkt_opens_flow(p) && !pkt_is_stream(p) ? bpf_map_lookup_elem(&sy_relays, &p->key) : 0;

	if (!r || flow_elapsed(r->seen, flow_clock()) > (__u32)(timeout_udp >> FLOW_CLOCK_SHIFT) ||
	    !spread_has_backends(local))
		return 0;
	struct allow_key k = { .prefix = 32 + 128, .source = r->next[0] };

	if (!bpf_map_lookup_elem(&sy_tunnel_src, &k))
		return 0;
	v->t.src = *self;
	v->t.dst = r->next[0];
	if (r->n > 1)
		spread_append(v, &r->next[1]);
	if (r->n > 2)
		spread_append(v, &r->next[2]);
	spread_append_self(p, v, self);
	v->chain.passed = 1;
	return 1;
}

/* spread_relay sends a packet to the next node in the list that came with it. A datagram of an unknown flow finally
 * returns to the first node of the list. */
static __always_inline struct flow *spread_relay(const struct pkt *p, struct verdict *v, const struct frontend *local,
						 const struct decap_ctx *in)
{
	struct allow_key k = { .prefix = 32 + 128, .source = in->chain.next[0] };

	if (!bpf_map_lookup_elem(&sy_tunnel_src, &k))
		return verdict_set(v, ACTION_DROP, REASON_UNKNOWN_TUNNEL_SOURCE);
	v->t.src = in->outer_dst;
	v->t.dst = in->chain.next[0];
	if (in->chain.n > 1)
		spread_append(v, &in->chain.next[1]);
	if (in->chain.n > 2)
		spread_append(v, &in->chain.next[2]);
	if (!in->chain.passed && pkt_opens_flow(p) && spread_has_backends(local))
		spread_append_self(p, v, &in->outer_dst);
	v->chain.passed = 1;
	return spread_send(v);
}

/* spread_open is for the last node of the list. It opens the flow or drops the packet. In both cases no previous node
 * has the flow. */
static __always_inline struct flow *spread_open(const struct pkt *p, struct verdict *v, struct frontend *local)
{
	if (local) {
		v->frontend = local->id;
		decide_new(p, v, local);
	} else {
		verdict_set(v, ACTION_DROP, REASON_NO_LOCAL_BACKEND);
	}
	if (!pkt_is_stream(p) && v->action != ACTION_FORWARD)
		v->commit = COMMIT_FORGET;
	return 0;
}

static __always_inline struct flow *decide_spread(const struct pkt *p, struct verdict *v, struct frontend *fe,
						  const struct decap_ctx *in, const int leave_local)
{
	struct frontend *local = 0;
	int is_new = pkt_is_stream(p) && pkt_opens_flow(p), locality;
	int asks = !is_new || fe->affinity; /* ask previous nodes of the slot */
	struct flow *f;

	if (in) {
		local = frontend_lookup(&p->key, 1);
		f = nat_find(p, v, fe->id, local);
		if (f)
			return decide_known(p, v, f);
		if ((!asks && spread_has_backends(local)) || spread_is_of_client(p, local))
			return spread_open(p, v, local);
		/* The older table may list this node again as the next one, but it must not send to itself. */
		if (in->chain.n && asks && !addr_equal(in->chain.next[0].w, in->outer_dst.w))
			return spread_relay(p, v, local, in);
		if (in->chain.passed)
			return spread_open(p, v, local);
		if (spread_follow(p, v, local, &in->outer_dst))
			return spread_send(v);
		/* The sending node's table may be out of date, so this node's table is used, once. */
	} else if (pkt_opens_flow(p) && !frontend_allows(fe, &p->key.t.src)) {
		return verdict_set(v, ACTION_DROP, REASON_NOT_ALLOWED);
	}
	locality = spread_candidates(fe, is_new);
	if (locality && !in) {
		if (leave_local) {
			v->local = 1;
			return verdict_set(v, ACTION_FORWARD, REASON_FORWARDED);
		}
		local = frontend_lookup(&p->key, 1);
		f = nat_find(p, v, fe->id, local);
		if (f)
			return decide_known(p, v, f);
		if (spread_is_of_client(p, local)) {
			if (locality & SLOT_IS_LOCAL || addr_is_zero(&v->t.dst))
				return spread_open(p, v, local);
			/* Two nodes may know the same client, from flows that arrived while the nodes had different tables. Here
			 * and on the other nodes, the slot's node is asked first. */
			spread_append(v, &v->t.src);
		}
		struct backend *self = addr_is_zero(&v->t.dst) ? backend_get(v->backend) : 0;

		if (self && spread_follow(p, v, local, &self->addr))
			return spread_send(v);
	}
	if (addr_is_zero(&v->t.dst) || (locality & SLOT_IS_LOCAL && !asks)) {
		if (in || locality)
			return spread_open(p, v, local);
		return fe->drop_when_empty ? verdict_set(v, ACTION_DROP, REASON_NO_LOCAL_BACKEND) :
					     verdict_refuse(p, v, REASON_NO_BACKEND);
	}
	if (pkt_opens_flow(p) && asks && spread_has_backends(local)) {
		if (in && !(locality & SLOT_IS_LOCAL))
			return spread_open(p, v, local);
		struct backend *self = locality & SLOT_IS_LOCAL ? backend_get(v->backend) : 0;

		if (self)
			spread_append_self(p, v, &self->addr);
	}
	if (in)
		v->t.src = in->outer_dst;
	v->chain.passed = in || locality & SLOT_IS_LOCAL;
	v->counted = v->chain.passed ? 1 : 2;
	return spread_send(v);
}
