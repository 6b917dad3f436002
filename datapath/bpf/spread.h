/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/* decide, for frontends that machines of one kind serve together. Whichever a packet comes to finds out by its hash who is to
 * deliver it, and keeps nothing. Who delivers keeps the flow, and passes a packet of a flow that it does not know on to those
 * that had its slot before (Faild and Beamer, both NSDI 2018). The list of those goes along with the packet and only gets
 * shorter, so none goes around in circles. */
#pragma once
#include "oneway.h"

/* append puts an address at the end of those that are to be asked; the first one is asked now. */
static __always_inline void append(struct verdict *v, const struct addr *a)
{
	__u32 n = v->chain.n;

	asm volatile("" : "+r"(n)); /* what is compared below is what is used */
	if (is_zero(&v->t.dst)) {
		v->t.dst = *a;
		return;
	}
	if (n >= CHAIN || is_v4(a) != is_v4(&v->t.dst)) /* a tunnel has addresses of one family */
		return;
	v->chain.next[n] = *a;
	v->chain.n = n + 1;
}

/* takes reports whether this machine has a backend for new flows of a frontend. */
static __always_inline int takes(const struct frontend *here)
{
	void *table;

	return here && table_of(here, &table);
}

enum {
	IS_OURS = 1, /* this machine is to deliver it */
	WAS_OURS = 2, /* it was, and may know its flow */
};

/* consider appends a machine that may know a flow. */
static __always_inline int consider(struct verdict *v, __u32 id)
{
	struct backend *b = bpf_map_lookup_elem(&backends, &id);

	if (!b)
		return 0;
	if (b->here)
		return WAS_OURS;
	if (is_zero(&v->t.dst))
		v->t.src = b->snat[0];
	append(v, &b->addr);
	return 0;
}

/* older considers the machines of a slot of the table before this one. */
static __always_inline int older(struct verdict *v, void *table, const struct slot *head, __u32 h)
{
	__u32 slots = head->previous[0];
	int whose = 0;

	if (!slots)
		return 0;
	__u32 i = 1 + head->backend + h % slots;
	struct slot *s = bpf_map_lookup_elem(table, &i);

	if (!s)
		return 0;
	whose |= consider(v, s->backend);
	for (int j = 0; j < PREVIOUS - 1; j++)
		whose |= consider(v, s->previous[j]);
	return whose;
}

/* candidates fills in who may know the flow of a packet: who has its slot, and those that had it. A flow that begins is known
 * to nobody. It says what this machine has to do with it. */
static __always_inline int candidates(const struct pkt *p, struct verdict *v, const struct frontend *fe, int begins)
{
	__u32 h = hash(&p->key, fe->spread);
	void *table;
	struct slot *head = table_of(fe, &table), *s = head ? slot_at(table, head->backend, h) : 0;
	int whose = 0;

	v->backend = NO_BACKEND;
	if (!s)
		return 0;
	v->backend = s->backend;
	if (consider(v, s->backend))
		whose = IS_OURS;
	for (int i = 0; i < PREVIOUS && !begins; i++) {
		if (s->previous[i] == NO_BACKEND)
			break;
		if (s->previous[i] == ANY_BACKEND) {
			whose |= older(v, table, head, h);
			break;
		}
		whose |= consider(v, s->previous[i]);
	}
	return whose;
}

/* pass sends a packet to the first machine that is to be asked. */
static __always_inline struct flow *pass(struct verdict *v)
{
	if (is_zero(&v->t.src))
		return say(v, ACTION_DROP, REASON_NO_ROUTE);
	tunnel_ports(v);
	v->method = METHOD_GUE;
	return say(v, ACTION_FORWARD, REASON_FORWARDED);
}

/* pass_on follows the list that came with a packet. A flow of datagrams that nobody knows comes back to who was first asked. */
static __always_inline struct flow *pass_on(const struct pkt *p, struct verdict *v, const struct frontend *here, const struct inside *in)
{
	struct allow_key k = { .prefix = 32 + 128, .source = in->chain.next[0] };

	if (!bpf_map_lookup_elem(&peers, &k))
		return say(v, ACTION_DROP, REASON_UNKNOWN_PEER);
	v->t.src = in->self;
	v->t.dst = in->chain.next[0];
	if (in->chain.n > 1)
		append(v, &in->chain.next[1]);
	if (in->chain.n > 2)
		append(v, &in->chain.next[2]);
	if (!in->chain.passed && opens(p) && takes(here))
		append(v, &in->self);
	v->chain.passed = 1;
	return pass(v);
}

static __always_inline struct flow *known(const struct pkt *p, struct verdict *v)
{
	struct flow *f = find(&p->key, &v->half);

	if (f && in_force(p, f, METHOD_NAT))
		return f;
	v->half = 0;
	return 0;
}

/* settle is for who is asked last: it opens the flow, or there is none. */
static __always_inline struct flow *settle(const struct pkt *p, struct verdict *v, const struct frontend *here)
{
	if (!here)
		return say(v, ACTION_DROP, REASON_NONE_HERE);
	v->frontend = here->id;
	v->half = 0;
	return decide_new(p, v, here);
}

static __always_inline struct flow *decide_spread(const struct pkt *p, struct verdict *v, const struct frontend *fe, const struct inside *in)
{
	struct frontend *here = frontend_of(&p->key, 1);
	int begins = is_stream(p) && opens(p), whose;
	struct flow *f;

	v->hash = hash(&p->key, SPREAD_FLOW);
	if (in) {
		f = known(p, v);
		if (f)
			return decide_known(p, v, f);
		if (begins && takes(here))
			return settle(p, v, here);
		if (in->chain.n && !begins)
			return pass_on(p, v, here, in);
		if (in->chain.passed)
			return settle(p, v, here);
		/* Who sent it may not know yet what we do, so our own table is asked, once. */
	} else if (opens(p) && !allowed_from(fe, &p->key.t.src)) {
		return say(v, ACTION_DROP, REASON_NOT_ALLOWED);
	}
	whose = candidates(p, v, fe, begins);
	if (whose && !in) {
		f = known(p, v);
		if (f)
			return decide_known(p, v, f);
	}
	if (is_zero(&v->t.dst) || (whose & IS_OURS && begins)) {
		if (in || whose)
			return settle(p, v, here);
		return fe->silent ? say(v, ACTION_DROP, REASON_NONE_HERE) : refuse(p, v, REASON_NO_BACKEND);
	}
	if (opens(p) && !begins && takes(here)) {
		if (in && !(whose & IS_OURS))
			return settle(p, v, here);
		struct backend *self = whose & IS_OURS ? bpf_map_lookup_elem(&backends, &v->backend) : 0;

		if (self)
			append(v, &self->addr);
	}
	if (in)
		v->t.src = in->self;
	v->chain.passed = in || whose & IS_OURS;
	v->counted = v->chain.passed ? 1 : 2;
	return pass(v);
}
