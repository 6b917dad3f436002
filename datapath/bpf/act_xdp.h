/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/* The XDP hook, which is the fast path. It passes packets that it cannot send unchanged to tc on the same interface. */
#pragma once
#include "act.h"
#include "commit.h"
#include "route.h"

#define XDP_TO_TC XDP_PASS

/* xdp_can_answer reports whether XDP may turn the frame into an answer and send it from the ingress interface. */
static __always_inline int xdp_can_answer(struct xdp_md *ctx, const struct pkt *p)
{
	return !xdp_has_frags(ctx, p) && (!no_xdp_tx || uplink_xmits(ctx->ingress_ifindex));
}

/* xdp_can_forward reports whether XDP may send from a route's interface. Not every driver sends frames in several
 * buffers that another interface has received. */
static __always_inline int xdp_can_forward(struct xdp_md *ctx, const struct scratch *s)
{
	return (s->fib.ifindex == ctx->ingress_ifindex && !no_xdp_tx) || (s->v.to_uplink && !xdp_has_frags(ctx, &s->p));
}

/* xdp_is_addressed reports whether a frame is for the uplink's MAC address. A switch may flood frames for others, and a
 * promiscuous interface receives them. If the uplink's address is unknown, tc decides, because it knows what the kernel
 * has decided. */
static __always_inline int xdp_is_addressed(struct xdp_md *ctx)
{
	struct ethhdr *eth = (void *)(long)ctx->data;
	struct uplink *up = uplink_get(ctx->ingress_ifindex);
	const __u16 *a = (void *)eth->dst, *b;

	if (!up || (void *)(eth + 1) > (void *)(long)ctx->data_end)
		return 0;
	b = (void *)up->mac;
	return a[0] == b[0] && a[1] == b[1] && a[2] == b[2];
}

/* xdp_send sends the packet from an interface, without further changes. */
static __always_inline int xdp_send(struct xdp_md *ctx, __u32 ifindex)
{
	if (ifindex == ctx->ingress_ifindex && !no_xdp_tx)
		return XDP_TX;
	return bpf_redirect(ifindex, 0);
}

/* xdp_send_to sends the packet to a route's next hop. */
static __always_inline int xdp_send_to(struct xdp_md *ctx, const struct bpf_fib_lookup *fib)
{
	struct ethhdr *eth = (void *)(long)ctx->data;

	if ((void *)(eth + 1) > (void *)(long)ctx->data_end)
		return XDP_DROP;
	mac_copy(eth->dst, fib->dmac);
	mac_copy(eth->src, fib->smac);
	return xdp_send(ctx, fib->ifindex);
}

__noinline int xdp_transform(struct xdp_md *ctx)
{
	return act_transform(ctx, HOOK_XDP);
}

__noinline int xdp_answer(struct xdp_md *ctx)
{
	return act_answer(ctx, HOOK_XDP);
}

static __always_inline int act_xdp(struct xdp_md *ctx, struct scratch *s, struct flow *f)
{
	const struct pkt *p = &s->p;
	struct verdict *v = &s->v;
	__be16 type = 0;
	__u32 n = 0;

	/* Other traffic of this node, or packets that tc handles and counts. */
	if (v->action == ACTION_PASS || v->local || (local_delivery && v->action == ACTION_DECAP) ||
	    p->l3 != sizeof(struct ethhdr) || !xdp_is_addressed(ctx) ||
	    (xdp_has_frags(ctx, p) && ctx->data_end - ctx->data < HEADERS_MAX))
		return XDP_TO_TC;
	if (v->action == ACTION_FORWARD) {
		enum route r = route_lookup(ctx, p->l3len, p, v, &s->fib);

		if (r == ROUTE_NO_NEIGHBOUR || r == ROUTE_FRAGMENT || (r == ROUTE_OK && !xdp_can_forward(ctx, s)))
			return XDP_TO_TC;
		if (r == ROUTE_OK && (f || v->commit != COMMIT_NONE || p->fragment == FRAG_FIRST))
			commit((struct flow_side *)f);
	}
	if (v->action > ACTION_FORWARD && v->action < ACTION_DECAP && !xdp_can_answer(ctx, p))
		return XDP_TO_TC;
	if (v->action == ACTION_DECAP)
		n = decap_parse((void *)(long)ctx->data, (void *)(long)ctx->data_end, p, v, &type);
	if (v->action == ACTION_DECAP && v->local) /* tc would treat the inner packet as a client's */
		return XDP_TO_TC;
	if (v->action > ACTION_FORWARD)
		answer_ratelimit();
	if (v->action > ACTION_FORWARD && v->action < ACTION_DECAP && !xdp_answer(ctx))
		return XDP_TO_TC; /* the answer does not fit behind the frame, which is still unchanged */
	verdict_count(p, v);
	switch (v->action) {
	case ACTION_FORWARD:
		if (xdp_transform(ctx))
			return xdp_send_to(ctx, &s->fib);
		verdict_internal_error();
		return XDP_DROP;
	case ACTION_DECAP:
		return xdp_decap(ctx, p, n, type) ? XDP_PASS : XDP_DROP;
	case ACTION_DROP:
		return XDP_DROP;
	default:
		return xdp_send(ctx, ctx->ingress_ifindex);
	}
}
