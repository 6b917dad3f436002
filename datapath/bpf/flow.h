/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/* The flow tables. A flow by nat has an entry for each direction; both are in `halfopen` until the client has proved
 * that it is there, then both are in `flows`. A one-way flow has one entry, in `halfopen` and then in `oneway`. Moving
 * writes the new place before it clears the old one, so a source port that is taken is found in at least one of them at
 * any moment. */
#pragma once
#include "config.h"
#include "maps.h"
#include "parse.h"

static __always_inline struct tuple reversed(const struct tuple *t)
{
	return (struct tuple){ .src = t->dst, .dst = t->src, .sport = t->dport, .dport = t->sport };
}

/* twin_key is where the other direction of f is found. */
static __always_inline struct flow_key twin_key(const struct flow *f, __u8 proto)
{
	return (struct flow_key){ .t = reversed(&f->t), .proto = proto };
}

static __always_inline int expired(const struct flow *f, __u8 proto, __u64 now)
{
	__u64 t = f->state == FLOW_CLOSED    ? timeout_closed :
		  f->state == FLOW_CLOSING   ? timeout_closing :
		  f->state == FLOW_HALF_OPEN ? timeout_half_open :
		  proto == IPPROTO_UDP	     ? timeout_udp :
					       timeout_established;

	/* Only a sample of the packets of a one-way flow refreshes it. */
	if (f->method != METHOD_NAT && f->state == FLOW_ESTABLISHED)
		t *= 4;
	return now - f->seen > t;
}

/* find returns the flow of a packet and says in which table it is. */
static __always_inline struct flow *find(const struct flow_key *k, __u8 *half)
{
	struct flow *f = bpf_map_lookup_elem(&flows, k);

	if (f)
		return f;
	*half = 1;
	return bpf_map_lookup_elem(&halfopen, k);
}

static __always_inline struct flow *find_oneway(const struct flow_key *k, __u8 *half)
{
	struct flow *f = bpf_map_lookup_elem(&oneway, k);

	if (f)
		return f;
	*half = 1;
	return bpf_map_lookup_elem(&halfopen, k);
}

/* pending_bit returns the word of `pending` that belongs to a hash, and the bit in it. */
static __always_inline __u64 *pending_bit(__u32 h, __u64 *bit)
{
	__u32 i = (h >> 6) % PENDING_WORDS;

	*bit = 1ULL << (h & 63);
	return bpf_map_lookup_elem(&pending, &i);
}

/* join gives a later fragment the ports of the first one. */
static __always_inline void join(struct pkt *p)
{
	struct fragment_key k = { .src = p->key.t.src, .dst = p->key.t.dst, .id = p->id, .proto = p->key.proto };
	struct fragment *f;

	if (p->fragment != LATER)
		return;
	f = bpf_map_lookup_elem(&fragments, &k);
	if (!f)
		return;
	p->key.t.sport = f->sport;
	p->key.t.dport = f->dport;
}
