/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/* Packets that this node sends: health checks that take the path of client traffic, and replies of servers behind a
 * tunnel that ends here. */
#pragma once
#include "act_tc.h"

/* Marks of health checks. The mark is the key in sy_probes. Go has the same value. */
#define PROBE_MARK 0x53590000

static __always_inline int egress_is_probe(const struct __sk_buff *skb)
{
	return (skb->mark & 0xffff0000) == PROBE_MARK;
}

#define EGRESS_NOT_MINE -2 /* not a packet for this function; not a tc return code */

/* egress_probe sends a health check packet to its server like a client's packet. */
static __always_inline int egress_probe(struct __sk_buff *skb, struct scratch *s)
{
	const struct pkt *p = &s->p;
	struct verdict *v = &s->v;
	__u32 mark = skb->mark;

	if (!egress_is_probe(skb))
		return EGRESS_NOT_MINE;
	struct probe *probe = bpf_map_lookup_elem(&sy_probes, &mark);

	if (!probe)
		return TC_ACT_SHOT;
	skb->mark = 0; /* the packet passes this hook again */
	verdict_set(v, ACTION_FORWARD, REASON_FORWARDED);
	v->method = probe->method;
	v->keyed = probe->keyed;
	v->t.src = probe->local;
	v->t.dst = probe->addr;
	v->hash = flow_hash(&p->key, ALGORITHM_FLOW_HASH);
	tunnel_set_ports(v);
	enum route r = route_lookup(skb, tc_segment_len(skb, p), p, v, &s->fib);

	return r == ROUTE_NONE ? TC_ACT_SHOT : tc_forward(skb, v, &s->fib, r);
}

/* egress_drop_spoofed drops a packet to the tunnel port that none of our programs has sent. It comes from a process or
 * pod on this node, and would arrive with this node's address. */
static __always_inline int egress_drop_spoofed(struct scratch *s)
{
	const struct pkt *p = &s->p;

	if (!tunnel_decap || p->key.proto != IPPROTO_UDP || p->icmp_error || p->key.t.dport != bpf_htons(tunnel_port))
		return EGRESS_NOT_MINE;
	verdict_set(&s->v, ACTION_DROP, REASON_TUNNEL_SPOOFED);
	verdict_count(p, &s->v);
	return TC_ACT_SHOT;
}

#define TCPOPT_MSS 2
#define TCP_OPTIONS_MAX 10 /* options to scan for the MSS, which senders put first */

/* egress_clamp_mss lowers the MSS that a server behind a tunnel announces, so that the client's segments fit the tunnel
 * (RFC 9293, 3.7.1). */
static __always_inline void egress_clamp_mss(struct __sk_buff *skb, const struct pkt *p, const struct addr *from)
{
	__u32 *n, mtu = 0, off = p->l4 + sizeof(struct tcphdr), stop = p->l3 + p->l3len - p->payload;

	if (p->key.proto != IPPROTO_TCP || pkt_without_l4(p) || (p->flags & (TCP_SYN | TCP_ACK)) != (TCP_SYN | TCP_ACK))
		return;
	n = bpf_map_lookup_elem(&sy_tunnel_hlen, from);
	if (!n || bpf_check_mtu(skb, 0, &mtu, 0, 0) < 0)
		return;
	__u16 fits = mtu - *n - (p->l4 - p->l3) - sizeof(struct tcphdr);

	for (int i = 0; i < TCP_OPTIONS_MAX; i++) {
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

/* egress_answers reports whether a packet can be a reply in a flow. A server answers a SYN with SYN and ACK, or with a
 * RST, before it sends anything else. If the SYN was forged, other packets to its claimed sender belong to that host's
 * connection with this machine's own address, for example through another balancer. */
static __always_inline int egress_answers(const struct pkt *p, const struct verdict *v, const struct flow *f)
{
	return !v->half_open || f->answered || p->key.proto != IPPROTO_TCP || pkt_without_l4(p) ||
	       p->flags & (TCP_SYN | TCP_RST) || !(addr_kinds(&p->key.t.src) & ADDR_OWN);
}

/* egress_refuse answers a reply that does not fit the route from the VIP with an ICMP error, as a router would, and
 * drops one that has no route. */
static __always_inline int egress_refuse(struct __sk_buff *skb, struct scratch *s)
{
	if (s->v.action == ACTION_TOO_BIG)
		answer_ratelimit();
	else
		verdict_set(&s->v, ACTION_DROP, s->v.reason);
	verdict_count(&s->p, &s->v);
	if (s->v.action != ACTION_TOO_BIG)
		return TC_ACT_SHOT;
	return tc_answer(skb) ? tc_as_from_lo(skb) : tc_internal_error();
}

/* egress_reroute sends a reply by the route from the VIP. The stack has routed it as a packet from the backend. The
 * kernel sends it to the next hop, and so keeps the neighbour entry. */
static __always_inline int egress_reroute(struct __sk_buff *skb, struct scratch *s, struct flow *f)
{
	__u32 len = tc_segment_len(skb, &s->p);

	s->v.hash = flow_hash(&s->p.key, ALGORITHM_FLOW_HASH);
	enum route r = route_resolve(skb, len, &s->p, &s->v, s->v.hash % NEXT_HOP_PATHS, &s->fib);

	if (r == ROUTE_NONE)
		return egress_refuse(skb, s);
	commit((struct flow_side *)f);
	verdict_count(&s->p, &s->v);
	egress_clamp_mss(skb, &s->p, &s->v.t.src);
	s->p.keep_ttl = 1;
	return tc_forward(skb, &s->v, &s->fib, r == ROUTE_OK ? ROUTE_NO_NEIGHBOUR : r);
}

/* egress_reply rewrites a reply of a backend on this node so that it comes from the VIP. */
static __always_inline int egress_reply(struct __sk_buff *skb, struct scratch *s)
{
	struct flow *f = proto_has_ports(s->p.key.proto) ? nat_find_reply(&s->p, &s->v) : 0;

	if (!f || !s->v.local || !egress_answers(&s->p, &s->v, f))
		return EGRESS_NOT_MINE;
	decide_reply(&s->p, &s->v, f);
	struct vip *vip = bpf_map_lookup_elem(&sy_vips, &s->v.t.src);

	if (vip && vip->by_source && s->v.action == ACTION_FORWARD)
		return egress_reroute(skb, s, f);
	commit((struct flow_side *)f);
	verdict_count(&s->p, &s->v);
	egress_clamp_mss(skb, &s->p, &s->v.t.src);
	return tc_deliver(skb, s);
}
