/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/* XDP: the fast path. What it cannot send itself it leaves untouched to tc, which is on the same interface. */
#pragma once
#include "answer.h"
#include "commit.h"
#include "route.h"

#define XDP_LEAVE XDP_PASS

/* can_send reports whether XDP may send out of an interface. Back out where it came in it always may, but on veth. */
static __always_inline int can_send(struct xdp_md *ctx, __u32 ifindex)
{
	return (ifindex == ctx->ingress_ifindex && !no_xdp_tx) || bpf_map_lookup_elem(&uplinks, &ifindex);
}

/* xdp_send sends the packet as it is out of an interface. */
static __always_inline int xdp_send(struct xdp_md *ctx, __u32 ifindex)
{
	if (ifindex == ctx->ingress_ifindex && !no_xdp_tx)
		return XDP_TX;
	return bpf_redirect(ifindex, 0);
}

static __always_inline int xdp_rewrite(struct xdp_md *ctx, const struct pkt *p, const struct tuple *t)
{
	void *data = (void *)(long)ctx->data, *end = (void *)(long)ctx->data_end;
	__sum16 *csum = data + (csum_offset(p) & 1023);

	if ((void *)(csum + 1) > end)
		return 0;
	if (*csum || p->key.proto == IPPROTO_TCP) { /* a UDP checksum of 0 means none (RFC 768) */
		__u32 sum = (__u16)~*csum;
		__u16 c = ~fold(bpf_csum_diff((__be32 *)&p->key.t, sizeof(*t), (__be32 *)t, sizeof(*t), sum));

		*csum = c || p->key.proto == IPPROTO_TCP ? c : 0xffff;
	}
	return rewrite_ports(data, end, p, t) && rewrite_l3(data, end, p, t);
}

static __always_inline int xdp_reset(struct xdp_md *ctx, const struct pkt *p)
{
	struct tcphdr tcp = reset_of(p);
	__u32 sum = pseudo_sum(p, sizeof(tcp), IPPROTO_TCP);

	tcp.csum = ~fold(bpf_csum_diff(0, 0, (__be32 *)&tcp, sizeof(tcp), sum));
	if (bpf_xdp_adjust_tail(ctx, (int)(p->l4 + sizeof(tcp)) - (int)p->len))
		return 0;
	void *data = (void *)(long)ctx->data, *end = (void *)(long)ctx->data_end;
	struct tcphdr *out = data + (p->l4 & 1023);

	if ((void *)(out + 1) > end)
		return 0;
	*out = tcp;
	return turn_around(data, end, p, sizeof(tcp), IPPROTO_TCP);
}

static __always_inline int xdp_refuse4(struct xdp_md *ctx, const struct pkt *p)
{
	struct unreachable4 u = { .icmp = { .type = ICMP_UNREACHABLE, .code = ICMP_PORT } };
	void *data = (void *)(long)ctx->data, *end = (void *)(long)ctx->data_end;

	if (p->l4 != L3 + sizeof(u.ip) || data + L3 + sizeof(u.ip) + QUOTE > end)
		return 0;
	__builtin_memcpy(&u.ip, data + L3, sizeof(u.ip) + QUOTE);
	u.icmp.csum = ~fold(bpf_csum_diff(0, 0, (__be32 *)&u, sizeof(u), 0));
	if (bpf_xdp_adjust_tail(ctx, (int)(p->l4 + sizeof(u)) - (int)p->len))
		return 0;
	data = (void *)(long)ctx->data;
	end = (void *)(long)ctx->data_end;
	if (data + L3 + sizeof(struct iphdr) + sizeof(u) > end)
		return 0;
	__builtin_memcpy(data + L3 + sizeof(struct iphdr), &u, sizeof(u));
	return turn_around(data, end, p, sizeof(u), IPPROTO_ICMP);
}

static __always_inline int xdp_refuse6(struct xdp_md *ctx, const struct pkt *p)
{
	struct unreachable6 u = { .icmp = { .type = ICMP6_UNREACHABLE, .code = ICMP6_PORT } };
	void *data = (void *)(long)ctx->data, *end = (void *)(long)ctx->data_end;

	if (p->l4 != L3 + sizeof(u.ip) || data + L3 + sizeof(u.ip) + QUOTE > end)
		return 0;
	__builtin_memcpy(&u.ip, data + L3, sizeof(u.ip) + QUOTE);
	u.icmp.csum = ~fold(bpf_csum_diff(0, 0, (__be32 *)&u, sizeof(u), pseudo_sum(p, sizeof(u), IPPROTO_ICMPV6)));
	if (bpf_xdp_adjust_tail(ctx, (int)(p->l4 + sizeof(u)) - (int)p->len))
		return 0;
	data = (void *)(long)ctx->data;
	end = (void *)(long)ctx->data_end;
	if (data + L3 + sizeof(struct ip6hdr) + sizeof(u) > end)
		return 0;
	__builtin_memcpy(data + L3 + sizeof(struct ip6hdr), &u, sizeof(u));
	return turn_around(data, end, p, sizeof(u), IPPROTO_ICMPV6);
}

static __always_inline int xdp_forward(struct xdp_md *ctx, const struct pkt *p, struct verdict *v, struct flow *f)
{
	struct bpf_fib_lookup fib;
	enum route r = route(ctx, ctx->ingress_ifindex, p->l3len, p, v, &fib);

	if (r == ROUTE_NO_NEIGHBOUR)
		return XDP_LEAVE;
	if (r == ROUTE_OK && !can_send(ctx, fib.ifindex))
		return XDP_LEAVE;
	if (r == ROUTE_OK)
		commit(p, v, f);
	count(p, v);
	if (v->action != ACTION_FORWARD || !xdp_rewrite(ctx, p, &v->t))
		return XDP_DROP;

	struct ethhdr *eth = (void *)(long)ctx->data;

	if ((void *)(eth + 1) > (void *)(long)ctx->data_end)
		return XDP_DROP;
	__builtin_memcpy(eth->dst, fib.dmac, ETH_ALEN);
	__builtin_memcpy(eth->src, fib.smac, ETH_ALEN);
	return xdp_send(ctx, fib.ifindex);
}

static __always_inline int act_xdp(struct xdp_md *ctx, const struct pkt *p, struct verdict *v, struct flow *f)
{
	void *data = (void *)(long)ctx->data, *end = (void *)(long)ctx->data_end;
	int ok = 0;

	if (v->action == ACTION_FORWARD)
		return xdp_forward(ctx, p, v, f);
	if (v->action == ACTION_PASS) /* the rest of the machine's traffic, or what tc counts */
		return XDP_LEAVE;
	if (v->action != ACTION_DROP && !can_send(ctx, ctx->ingress_ifindex))
		return XDP_LEAVE;
	switch (v->action) {
	case ACTION_ECHO:
		ok = echo(data, end, p);
		break;
	case ACTION_RESET:
		ok = xdp_reset(ctx, p);
		break;
	case ACTION_REFUSE:
		ok = p->v6 ? xdp_refuse6(ctx, p) : xdp_refuse4(ctx, p);
		break;
	default:
		break;
	}
	count(p, v);
	return ok ? xdp_send(ctx, ctx->ingress_ifindex) : XDP_DROP;
}
