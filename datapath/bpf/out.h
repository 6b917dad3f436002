/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/* What this machine itself sends: health checks that must go the way of traffic, and answers of servers behind a tunnel
 * that ends here. */
#pragma once
#include "act_tc.h"

/* Marks of our health checks; the lower half is the key in `probes`. The same in Go. */
#define PROBE_MARK 0x53590000

static __always_inline int is_probe(const struct __sk_buff *skb)
{
	return (skb->mark & 0xffff0000) == PROBE_MARK;
}

#define OUT_OTHER -2 /* not what a function is for; no verdict of tc */

/* out_probe sends a packet of a health check to its server like one of a client. */
static __always_inline int out_probe(struct __sk_buff *skb, struct work *w)
{
	const struct pkt *p = &w->p;
	struct verdict *v = &w->v;
	__u32 mark = skb->mark;

	if (!is_probe(skb))
		return OUT_OTHER;
	struct probe *probe = bpf_map_lookup_elem(&probes, &mark);

	if (!probe)
		return TC_ACT_SHOT;
	skb->mark = 0; /* it comes by here again */
	say(v, ACTION_FORWARD, REASON_FORWARDED);
	v->method = probe->method;
	v->t.src = probe->local;
	v->t.dst = probe->addr;
	v->hash = hash(&p->key, SPREAD_FLOW);
	tunnel_ports(v);
	enum route r = route(skb, probe->ifindex, part_len(skb, p), p, v, &w->fib);

	return r == ROUTE_NONE ? TC_ACT_SHOT : tc_forward(skb, v, &w->fib, r);
}

static __always_inline void out_clamp(struct __sk_buff *skb, const struct pkt *p, const struct addr *from);

/* out_answer makes an answer of a backend on this machine come from the VIP. */
static __always_inline int out_answer(struct __sk_buff *skb, struct work *w)
{
	struct flow *f = has_ports(w->p.key.proto) ? find(&w->p.key, &w->v.half) : 0;

	if (!f || !f->reply || !f->here)
		return OUT_OTHER;
	decide_reply(&w->p, &w->v, f);
	commit(f);
	count(&w->p, &w->v);
	out_clamp(skb, &w->p, &f->t.src);
	return tc_deliver(skb, w);
}

#define TCPOPT_END 0
#define TCPOPT_NOP 1
#define TCPOPT_MSS 2
#define MAX_OPTIONS 10 /* looked at before that of the segment size, which everybody has first */

/* out_clamp makes a server that answers a client directly announce a segment size that fits the tunnel which the client's
 * packets come through (RFC 9293, 3.7.1). */
static __always_inline void out_clamp(struct __sk_buff *skb, const struct pkt *p, const struct addr *from)
{
	__u32 *n, mtu = 0, off = p->l4 + sizeof(struct tcphdr), stop = p->l3 + p->l3len - p->segment;

	if (p->key.proto != IPPROTO_TCP || is_part(p) || (p->flags & (TCP_SYN | TCP_ACK)) != (TCP_SYN | TCP_ACK))
		return;
	n = bpf_map_lookup_elem(&tunnelled, from);
	if (!n || bpf_check_mtu(skb, 0, &mtu, 0, 0) < 0)
		return;
	__u16 fits = mtu - *n - (p->l4 - p->l3) - sizeof(struct tcphdr);

	for (int i = 0; i < MAX_OPTIONS; i++) {
		struct {
			__u8 kind, len;
			__be16 mss;
		} o;

		if (off + sizeof(o) > stop || bpf_skb_load_bytes(skb, off, &o, sizeof(o)) || o.kind == TCPOPT_END)
			return;
		if (o.kind == TCPOPT_NOP) {
			off++;
			continue;
		}
		if (o.kind == TCPOPT_MSS) {
			__be16 new = bpf_htons(fits);

			if (o.len != 4 || bpf_ntohs(o.mss) <= fits || off & 1)
				return;
			bpf_l4_csum_replace(skb, csum_offset(p), o.mss, new, sizeof(new));
			bpf_skb_store_bytes(skb, off + 2, &new, sizeof(new), 0);
			return;
		}
		if (o.len < 2)
			return;
		off += o.len;
	}
}
