/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/* decide, for the methods with which servers answer clients themselves. */
#pragma once
#include "nat.h"

/* tunnel_ports: routers on the way spread flows by them. */
static __always_inline void tunnel_ports(struct verdict *v)
{
	v->t.sport = bpf_htons(0xc000 | (v->hash & 0x3fff));
	v->t.dport = bpf_htons(tunnel_port);
}

/* aim sends a one-way packet towards a backend. */
static __always_inline struct flow *aim(struct verdict *v, __u8 method, struct flow *f, enum commit c)
{
	struct backend *b = bpf_map_lookup_elem(&backends, &v->backend);

	if (!b || is_zero(&b->snat[0]))
		return say(v, ACTION_DROP, REASON_NO_ROUTE);
	v->method = method;
	v->t.src = b->snat[0];
	v->t.dst = b->addr;
	tunnel_ports(v);
	v->counted = 2;
	v->commit = c;
	say(v, ACTION_FORWARD, REASON_FORWARDED);
	return f;
}

static __always_inline struct flow *decide_oneway_known(const struct pkt *p, struct verdict *v, struct flow *f)
{
	enum commit c = COMMIT_TOUCH;

	if (is_part(p))
		c = COMMIT_NONE;
	else if (is_stream(p) && p->flags & (TCP_FIN | TCP_RST))
		c = COMMIT_CLOSE;
	else if (v->half && (!is_stream(p) || p->flags & TCP_ACK))
		c = COMMIT_PROVE;
	v->backend = f->backend;
	return aim(v, f->method, f, c);
}

/* How often a packet is looked up that need not be: it refreshes its flow, and finds flows that began elsewhere. */
#define SAMPLE_STREAM 32
#define SAMPLE_DATAGRAM 8 /* nothing else tells that a flow of datagrams begins */

/* noteworthy reports whether the entry of a flow is to be made or changed. */
static __always_inline int noteworthy(const struct pkt *p, struct verdict *v)
{
	__u64 bit, *word = pending_bit(v->hash, &bit);

	if (is_part(p))
		return 0;
	v->pending = word && *word & bit;
	if (v->pending || (is_stream(p) && p->flags & (TCP_SYN | TCP_FIN | TCP_RST)))
		return 1;
	return bpf_get_prandom_u32() % (is_stream(p) ? SAMPLE_STREAM : SAMPLE_DATAGRAM) == 0;
}

/* One-way flows: while a slot keeps its backend the hash says all, and no flow is looked up. */
static __always_inline struct flow *decide_oneway(const struct pkt *p, struct verdict *v, const struct frontend *fe)
{
	int by_hash = (fe->spread == SPREAD_FLOW || fe->spread == SPREAD_SOURCE) && !fe->affinity;
	struct slot *s = by_hash ? choose(fe, &p->key) : 0;

	v->hash = hash(&p->key, SPREAD_FLOW);
	int look = noteworthy(p, v);

	if (!s || look || s->previous[0] != NO_BACKEND) {
		struct flow *f = find_oneway(&p->key, &v->half);

		/* A SYN again may mean that where the first one went nobody serves any more: then the table of now decides. */
		if (f && in_force(p, f, fe->method) && !(s && v->half && is_stream(p) && opens(p)))
			return decide_oneway_known(p, v, f);
		v->half = 0;
	}
	if (!by_hash && !opens(p))
		return refuse(p, v, REASON_NO_FLOW);
	if (!allowed_from(fe, &p->key.t.src))
		return say(v, ACTION_DROP, REASON_NOT_ALLOWED);
	if (s)
		v->backend = s->backend;
	else if (!pick(p, v, fe))
		return refuse(p, v, REASON_NO_BACKEND);
	return aim(v, fe->method, 0, (look || !by_hash) && !(p->flags & (TCP_FIN | TCP_RST)) ? COMMIT_OPEN : COMMIT_NONE);
}

/* decide_tunnel decides about what concerns the tunnels themselves, and reports whether this did. */
static __always_inline int decide_tunnel(const struct pkt *p, struct verdict *v)
{
	if (p->error && p->mtu >= MIN_MTU && bpf_map_lookup_elem(&paths, &p->key.t.src) &&
	    (p->key.proto == IPPROTO_IPIP || p->key.proto == IPPROTO_IPV6 ||
	     (p->key.proto == IPPROTO_UDP && p->key.t.sport == bpf_htons(tunnel_port)))) {
		say(v, ACTION_PASS, REASON_PATH);
		v->commit = COMMIT_PATH;
		return 1;
	}
	if (!tunnel_end || p->fragment || p->error || p->key.proto != IPPROTO_UDP || p->key.t.dport != bpf_htons(tunnel_port) ||
	    !bpf_map_lookup_elem(&own, &p->key.t.dst))
		return 0;
	struct allow_key k = { .prefix = 32 + 128, .source = p->key.t.src };

	if (bpf_map_lookup_elem(&peers, &k))
		say(v, ACTION_DECAP, REASON_TUNNELLED);
	else
		say(v, ACTION_DROP, REASON_UNKNOWN_PEER);
	return 1;
}
