/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/* The flow tables. A NAT flow has an entry for each direction: both in sy_halfopen until the client is confirmed,
 * then both in sy_flows. A move writes the new entry before it deletes the old one, so a claimed source port is
 * always found in at least one table. Flows by direct return are in dsr.h. */
#pragma once
#include "config.h"
#include "maps.h"
#include "parse.h"

static __always_inline struct tuple tuple_reverse(const struct tuple *t)
{
	return (struct tuple){ .src = t->dst, .dst = t->src, .sport = t->dport, .dport = t->sport };
}

/* flow_reverse_key returns the key of the other direction of f. */
static __always_inline struct flow_key flow_reverse_key(const struct flow *f, __u8 proto)
{
	return (struct flow_key){ .t = tuple_reverse(&f->t), .proto = proto };
}

static __always_inline int flow_expired(const struct flow *f, __u8 proto, __u64 now)
{
	__u64 t = f->state == FLOW_CLOSED    ? timeout_closed :
		  f->state == FLOW_CLOSING   ? timeout_closing :
		  f->state == FLOW_HALF_OPEN ? timeout_half_open :
		  proto == IPPROTO_UDP	     ? timeout_udp :
					       timeout_established;

	return now - f->seen > t;
}

/* flow_find returns the flow of a packet, and in which table it is. */
static __always_inline struct flow *flow_find(const struct flow_key *k, __u8 *half)
{
	struct flow *f = bpf_map_lookup_elem(&sy_flows, k);

	if (f)
		return f;
	*half = 1;
	return bpf_map_lookup_elem(&sy_halfopen, k);
}

/* frag_join sets the ports of a later fragment from the first one. */
static __always_inline void frag_join(struct pkt *p)
{
	struct fragment_key k = { .src = p->key.t.src, .dst = p->key.t.dst, .id = p->frag_id, .proto = p->key.proto };
	struct fragment *f;

	if (p->fragment != FRAG_LATER)
		return;
	f = bpf_map_lookup_elem(&sy_frags, &k);
	if (!f)
		return;
	p->key.t.sport = f->sport;
	p->key.t.dport = f->dport;
}
