/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/* The XDP hook: the fast path. What XDP cannot send itself it passes unchanged to tc on the same interface. */
#pragma once
#include "answer.h"
#include "commit.h"
#include "route.h"

#define XDP_TO_TC XDP_PASS

/* xdp_can_send reports whether XDP may send out of an interface. The ingress interface is always allowed, except
 * on veth. */
static __always_inline int xdp_can_send(struct xdp_md *ctx, __u32 ifindex)
{
	return (ifindex == ctx->ingress_ifindex && !no_xdp_tx) || bpf_map_lookup_elem(&sy_uplinks, &ifindex);
}

/* xdp_send sends the packet as it is out of an interface. */
static __always_inline int xdp_send(struct xdp_md *ctx, __u32 ifindex)
{
	if (ifindex == ctx->ingress_ifindex && !no_xdp_tx)
		return XDP_TX;
	return bpf_redirect(ifindex, 0);
}

/* The frame up to its IP header: MAC addresses and up to two VLAN tags. */
struct l2 {
	__u8 macs[2 * ETH_ALEN];
	__be16 types[5];
};

static __always_inline void l2_set_type(struct l2 *l2, const struct pkt *p, __be16 type)
{
	if (p->l3 == sizeof(struct ethhdr))
		l2->types[0] = type;
	else if (p->l3 == sizeof(struct ethhdr) + sizeof(struct vlan))
		l2->types[2] = type;
	else
		l2->types[4] = type;
}

/* xdp_push inserts size bytes before the IP header and sets the ethertype. */
static __always_inline int xdp_push(struct xdp_md *ctx, const struct pkt *p, const void *outer, __u32 size, __be16 type)
{
	if (bpf_xdp_adjust_head(ctx, -(int)size))
		return 0;
	void *data = (void *)(long)ctx->data, *end = (void *)(long)ctx->data_end;
	void *l3 = data + L3(p);

	if (data + size + sizeof(struct l2) > end || l3 + size > end)
		return 0;
	__builtin_memmove(data, data + size, sizeof(struct l2)); /* the surplus is overwritten below */
	l2_set_type(data, p, type);
	__builtin_memcpy(l3, outer, size);
	return 1;
}

static __always_inline int xdp_encap(struct xdp_md *ctx, const struct pkt *p, const struct verdict *v)
{
	if (addr_is_v4(&v->t.dst)) {
		struct outer4 o;

		encap_outer4(p, v, &o);
		if (v->method == METHOD_IPIP)
			return xdp_push(ctx, p, &o, sizeof(o.ip), bpf_htons(ETH_P_IP));
		if (encap_has_chain(v))
			return xdp_push(ctx, p, &o, sizeof(o), bpf_htons(ETH_P_IP));
		return xdp_push(ctx, p, &o, sizeof(o) - sizeof(o.chain), bpf_htons(ETH_P_IP));
	}
	struct outer6 o;

	encap_outer6(p, v, &o);
	if (v->method == METHOD_IPIP)
		return xdp_push(ctx, p, &o, sizeof(o.ip), bpf_htons(ETH_P_IPV6));
	if (encap_has_chain(v))
		return xdp_push(ctx, p, &o, sizeof(o), bpf_htons(ETH_P_IPV6));
	return xdp_push(ctx, p, &o, sizeof(o) - sizeof(o.chain), bpf_htons(ETH_P_IPV6));
}

/* xdp_decap removes n bytes of outer headers and sets the ethertype. */
static __always_inline int xdp_decap(struct xdp_md *ctx, const struct pkt *p, __u32 n, __be16 type)
{
	void *data = (void *)(long)ctx->data, *end = (void *)(long)ctx->data_end;
	struct l2 l2;

	if (data + sizeof(l2) > end)
		return 0;
	__builtin_memcpy(&l2, data, sizeof(l2));
	l2_set_type(&l2, p, type);
	if (bpf_xdp_adjust_head(ctx, n & 1023))
		return 0;
	data = (void *)(long)ctx->data;
	end = (void *)(long)ctx->data_end;
	if (data + sizeof(l2) > end)
		return 0;
	if (p->l3 == sizeof(struct ethhdr))
		__builtin_memcpy(data, &l2, sizeof(struct ethhdr));
	else if (p->l3 == sizeof(struct ethhdr) + sizeof(struct vlan))
		__builtin_memcpy(data, &l2, sizeof(struct ethhdr) + sizeof(struct vlan));
	else
		__builtin_memcpy(data, &l2, sizeof(l2));

	struct pkt inner = { .len = end - data };

	if (parse(data, end, &inner) == REASON_NONE)
		decap_note_overhead(&inner.key.t.dst, n);
	return 1;
}

static __always_inline int xdp_rewrite_csum(void *data, void *end, const struct pkt *p, const struct tuple *t)
{
	__sum16 *csum = data + (csum_offset(p) & 1023);

	if ((void *)(csum + 1) > end)
		return 0;
	if (*csum || p->key.proto == IPPROTO_TCP) { /* a UDP checksum of 0 means none (RFC 768) */
		__u16 sum = ~*csum;
		__u16 c = ~csum_fold(bpf_csum_diff((__be32 *)&p->key.t, sizeof(*t), (__be32 *)t, sizeof(*t), sum));

		*csum = c || p->key.proto == IPPROTO_TCP ? c : 0xffff;
	}
	return 1;
}

static __always_inline int xdp_rewrite(struct xdp_md *ctx, const struct pkt *p, const struct tuple *t)
{
	void *data = (void *)(long)ctx->data, *end = (void *)(long)ctx->data_end;

	if (p->icmp_error)
		return rewrite_icmp_error(data, end, p, t);
	if (p->fragment == FRAG_LATER)
		return rewrite_l3(data, end, p, t);
	if (p->key.proto == IPPROTO_SCTP)
		return rewrite_sctp(data, end, p, t) && rewrite_l3(data, end, p, t);
	return xdp_rewrite_csum(data, end, p, t) && rewrite_ports(data, end, p, t) && rewrite_l3(data, end, p, t);
}

static __always_inline int xdp_reset(struct xdp_md *ctx, const struct pkt *p)
{
	struct tcphdr tcp = tcp_reset_header(p);
	__u32 sum = csum_pseudo(p, sizeof(tcp), IPPROTO_TCP);

	tcp.csum = ~csum_fold(bpf_csum_diff(0, 0, (__be32 *)&tcp, sizeof(tcp), sum));
	if (bpf_xdp_adjust_tail(ctx, (int)(p->l4 + sizeof(tcp)) - (int)p->len))
		return 0;
	void *data = (void *)(long)ctx->data, *end = (void *)(long)ctx->data_end;
	struct tcphdr *out = data + L4(p);

	if ((void *)(out + 1) > end)
		return 0;
	*out = tcp;
	return rewrite_to_answer(data, end, p, sizeof(tcp), IPPROTO_TCP);
}

static __always_inline int xdp_error4(struct xdp_md *ctx, const struct pkt *p, const struct verdict *v)
{
	struct error4 e = { .icmp = icmp_error_header(p, v) };
	void *data = (void *)(long)ctx->data, *end = (void *)(long)ctx->data_end;
	void *l3 = data + L3(p);

	if (p->l4 != p->l3 + sizeof(e.ip) || l3 + sizeof(e.ip) + QUOTE > end)
		return 0;
	__builtin_memcpy(&e.ip, l3, sizeof(e.ip) + QUOTE);
	e.icmp.csum = ~csum_fold(bpf_csum_diff(0, 0, (__be32 *)&e, sizeof(e), 0));
	if (bpf_xdp_adjust_tail(ctx, (int)(p->l4 + sizeof(e)) - (int)p->len))
		return 0;
	data = (void *)(long)ctx->data;
	end = (void *)(long)ctx->data_end;
	l3 = data + L3(p);
	if (l3 + sizeof(struct iphdr) + sizeof(e) > end)
		return 0;
	__builtin_memcpy(l3 + sizeof(struct iphdr), &e, sizeof(e));
	return rewrite_to_answer(data, end, p, sizeof(e), IPPROTO_ICMP);
}

static __always_inline int xdp_error6(struct xdp_md *ctx, const struct pkt *p, const struct verdict *v,
				      const __u32 quote)
{
	struct error6 e = { .icmp = icmp_error_header(p, v) };
	const __u32 size = sizeof(e) - QUOTE_LONG + quote;
	void *data = (void *)(long)ctx->data, *end = (void *)(long)ctx->data_end;
	void *l3 = data + L3(p);

	if (l3 + sizeof(e.ip) + quote > end)
		return 0;
	__builtin_memcpy(&e.ip, l3, sizeof(e.ip) + quote);
	e.icmp.csum = ~csum_fold(bpf_csum_diff(0, 0, (__be32 *)&e, size, csum_pseudo(p, size, IPPROTO_ICMPV6)));
	if (bpf_xdp_adjust_tail(ctx, (int)(p->l4 + size) - (int)p->len))
		return 0;
	data = (void *)(long)ctx->data;
	end = (void *)(long)ctx->data_end;
	l3 = data + L3(p);
	if (l3 + sizeof(struct ip6hdr) + size > end)
		return 0;
	__builtin_memcpy(l3 + sizeof(struct ip6hdr), &e, size);
	return rewrite_to_answer(data, end, p, size, IPPROTO_ICMPV6);
}

/* xdp_transform rewrites or encapsulates the packet as the verdict says. */
__noinline int xdp_transform(struct xdp_md *ctx)
{
	struct scratch *s = scratch_get();

	if (!s)
		return 0;
	const struct pkt *p = &s->p;
	const struct verdict *v = &s->v;

	if (v->method == METHOD_NAT)
		return xdp_rewrite(ctx, p, &v->t);
	if (!rewrite_ttl((void *)(long)ctx->data, (void *)(long)ctx->data_end, p))
		return 0;
	return v->method == METHOD_DSR || xdp_encap(ctx, p, v);
}

/* xdp_answer turns the packet into the answer to it. */
__noinline int xdp_answer(struct xdp_md *ctx)
{
	struct scratch *s = scratch_get();

	if (!s)
		return 0;
	struct pkt *p = &s->p;

	switch (s->v.action) {
	case ACTION_ECHO:
		return icmp_echo_reply((void *)(long)ctx->data, (void *)(long)ctx->data_end, p);
	case ACTION_RESET:
		return xdp_reset(ctx, p);
	case ACTION_REFUSE:
	case ACTION_TOO_BIG:
		if (!p->v6)
			return xdp_error4(ctx, p, &s->v);
		if (icmp_strip_extensions(p) == QUOTE)
			return xdp_error6(ctx, p, &s->v, QUOTE);
		return xdp_error6(ctx, p, &s->v, QUOTE_LONG);
	default:
		return 0;
	}
}

static __always_inline int xdp_forward(struct xdp_md *ctx, const struct bpf_fib_lookup *fib)
{
	if (!xdp_transform(ctx)) {
		verdict_internal_error();
		return XDP_DROP;
	}

	struct ethhdr *eth = (void *)(long)ctx->data;

	if ((void *)(eth + 1) > (void *)(long)ctx->data_end)
		return XDP_DROP;
	__builtin_memcpy(eth->dst, fib->dmac, ETH_ALEN);
	__builtin_memcpy(eth->src, fib->smac, ETH_ALEN);
	return xdp_send(ctx, fib->ifindex);
}

static __always_inline int act_xdp(struct xdp_md *ctx, struct scratch *s, struct flow *f)
{
	const struct pkt *p = &s->p;
	struct verdict *v = &s->v;
	__be16 type = 0;
	__u32 n = 0;

	/* Other traffic of this node, or a packet that tc handles and counts. */
	if (v->action == ACTION_PASS || v->local || (local_delivery && v->action == ACTION_DECAP))
		return XDP_TO_TC;
	if (v->action == ACTION_FORWARD) {
		enum route r = route_lookup(ctx, ctx->ingress_ifindex, p->l3len, p, v, &s->fib);

		if (r == ROUTE_NO_NEIGHBOUR || (r == ROUTE_OK && !xdp_can_send(ctx, s->fib.ifindex)))
			return XDP_TO_TC;
		if (r == ROUTE_OK)
			commit(f);
	}
	if (v->action > ACTION_FORWARD && v->action < ACTION_DECAP && !xdp_can_send(ctx, ctx->ingress_ifindex))
		return XDP_TO_TC;
	if (v->action == ACTION_DECAP)
		n = decap_parse((void *)(long)ctx->data, (void *)(long)ctx->data_end, p, v, &type);
	icmp_ratelimit(v);
	verdict_count(p, v);
	switch (v->action) {
	case ACTION_FORWARD:
		return xdp_forward(ctx, &s->fib);
	case ACTION_DECAP:
		return xdp_decap(ctx, p, n, type) ? XDP_PASS : XDP_DROP;
	case ACTION_DROP:
		return XDP_DROP;
	default:
		return xdp_answer(ctx) ? xdp_send(ctx, ctx->ingress_ifindex) : XDP_DROP;
	}
}
