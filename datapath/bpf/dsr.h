/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/* decide, for direct server return (DSR): METHOD_DSR and the tunnels. The server answers the client itself, so
 * only one direction passes here. */
#pragma once
#include "nat.h"

/* tunnel_set_ports derives the outer source port from the flow hash, for ECMP on the path. */
static __always_inline void tunnel_set_ports(struct verdict *v)
{
	v->t.sport = bpf_htons(0xc000 | (v->hash & 0x3fff));
	v->t.dport = bpf_htons(tunnel_port);
}

/* dsr_forward sends a packet to a backend by DSR. */
static __always_inline struct flow *dsr_forward(struct verdict *v, __u8 method, struct flow *f, enum commit c)
{
	struct backend *b = bpf_map_lookup_elem(&sy_backends, &v->backend);

	if (!b || addr_is_zero(&b->snat[0]))
		return verdict_set(v, ACTION_DROP, REASON_NO_ROUTE);
	v->method = method;
	v->t.src = b->snat[0];
	v->t.dst = b->addr;
	tunnel_set_ports(v);
	v->counted = 2;
	v->commit = c;
	verdict_set(v, ACTION_FORWARD, REASON_FORWARDED);
	return f;
}

static __always_inline struct flow *decide_dsr_known(const struct pkt *p, struct verdict *v, struct flow *f)
{
	enum commit c = COMMIT_TOUCH;

	if (pkt_without_l4(p))
		c = COMMIT_NONE;
	else if (pkt_is_stream(p) && p->flags & (TCP_FIN | TCP_RST))
		c = COMMIT_CLOSE;
	else if (v->half_open && (!pkt_is_stream(p) || p->flags & TCP_ACK))
		c = COMMIT_CONFIRM;
	v->backend = f->backend;
	return dsr_forward(v, f->method, f, c);
}

/* One in so many packets is looked up without need: it refreshes its flow and finds flows that began on another
 * balancer. */
#define DSR_SAMPLE_STREAM 32
#define DSR_SAMPLE_DATAGRAM 8 /* higher, because no flag marks the first datagram of a flow */

/* dsr_needs_lookup reports whether the flow entry must be created or updated. */
static __always_inline int dsr_needs_lookup(const struct pkt *p, struct verdict *v)
{
	__u64 bit, *word = dsr_pending_bit(v->hash, &bit);

	if (pkt_without_l4(p))
		return 0;
	v->dsr_pending = word && *word & bit;
	if (v->dsr_pending || (pkt_is_stream(p) && p->flags & (TCP_SYN | TCP_FIN | TCP_RST)))
		return 1;
	return bpf_get_prandom_u32() % (pkt_is_stream(p) ? DSR_SAMPLE_STREAM : DSR_SAMPLE_DATAGRAM) == 0;
}

/* As long as a slot keeps its backend, the hash determines the backend and no flow is looked up. */
static __always_inline struct flow *decide_dsr(const struct pkt *p, struct verdict *v, const struct frontend *fe)
{
	int by_hash = (fe->algorithm == ALGORITHM_FLOW_HASH || fe->algorithm == ALGORITHM_SOURCE_HASH) && !fe->affinity;
	struct slot *s = by_hash ? table_select(fe, &p->key) : 0;

	v->hash = flow_hash(&p->key, ALGORITHM_FLOW_HASH);
	int lookup = dsr_needs_lookup(p, v);

	if (!s || lookup || s->previous[0] != NO_BACKEND) {
		struct flow *f = flow_find_dsr(&p->key, &v->half_open);

		/* A repeated SYN may mean that the first backend no longer answers: then the current table
		 * decides. */
		if (f && flow_valid(p, f, fe->method) && !(s && v->half_open && pkt_is_stream(p) && pkt_opens_flow(p)))
			return decide_dsr_known(p, v, f);
		v->half_open = 0;
	}
	if (!by_hash && !pkt_opens_flow(p))
		return verdict_refuse(p, v, REASON_NO_FLOW);
	if (!frontend_allows(fe, &p->key.t.src))
		return verdict_set(v, ACTION_DROP, REASON_NOT_ALLOWED);
	if (s)
		v->backend = s->backend;
	else if (!backend_select(p, v, fe))
		return verdict_refuse(p, v, REASON_NO_BACKEND);
	return dsr_forward(v, fe->method, 0,
			   (lookup || !by_hash) && !(p->flags & (TCP_FIN | TCP_RST)) ? COMMIT_OPEN : COMMIT_NONE);
}

/* decide_tunnel handles the packets of the tunnels themselves, and reports whether this is one. */
static __always_inline int decide_tunnel(const struct pkt *p, struct verdict *v)
{
	if (p->icmp_error && p->mtu >= MIN_MTU && bpf_map_lookup_elem(&sy_pmtu, &p->key.t.src) &&
	    (p->key.proto == IPPROTO_IPIP || p->key.proto == IPPROTO_IPV6 ||
	     (p->key.proto == IPPROTO_UDP && p->key.t.sport == bpf_htons(tunnel_port)))) {
		verdict_set(v, ACTION_PASS, REASON_PMTU_LEARNED);
		v->commit = COMMIT_PMTU;
		return 1;
	}
	if (!tunnel_decap || p->fragment || p->icmp_error || p->key.proto != IPPROTO_UDP ||
	    p->key.t.dport != bpf_htons(tunnel_port) || !bpf_map_lookup_elem(&sy_local_addrs, &p->key.t.dst))
		return 0;
	struct allow_key k = { .prefix = 32 + 128, .source = p->key.t.src };

	if (bpf_map_lookup_elem(&sy_tunnel_src, &k))
		verdict_set(v, ACTION_DECAP, REASON_DECAPSULATED);
	else
		verdict_set(v, ACTION_DROP, REASON_UNKNOWN_TUNNEL_SOURCE);
	return 1;
}
