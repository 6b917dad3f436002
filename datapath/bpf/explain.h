/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/* explain: what would happen to a packet and its reply. It reads maps and routes but changes nothing, so it neither
 * uses nor stores cached next hops. */
#pragma once
#include "decide.h"
#include "route.h"

#define EXPLAIN_DECAP 0xff /* first byte of the source MAC address of a decapsulated packet; no host has it */

/* explain_made returns the mark that distinguishes a synthetic packet from network packets. Linux 6.1 lets network
 * packets interrupt a test run, and they overwrite the synthetic packet's state. */
static __always_inline __u8 explain_made(struct xdp_md *ctx)
{
	struct ethhdr *eth = (void *)(long)ctx->data;

	return (void *)(eth + 1) > (void *)(long)ctx->data_end ? 0 : eth->src[5];
}

/* explain_decap returns the context of a packet that another node has sent here through a tunnel, with no other nodes
 * left to try. */
static __always_inline const struct decap_ctx *explain_decap(struct xdp_md *ctx, struct scratch *s)
{
	struct ethhdr *eth = (void *)(long)ctx->data;

	if ((void *)(eth + 1) > (void *)(long)ctx->data_end || eth->src[0] != EXPLAIN_DECAP)
		return 0;
	__builtin_memset(&s->in, 0, sizeof(s->in));
	s->in.chain.passed = 1;
	return &s->in;
}

/* explain_delivery finds the route of a packet that the stack delivers. */
static __always_inline enum reason explain_delivery(void *ctx, struct scratch *s)
{
	switch (route_ask(ctx, s->p.l3len, &s->p, &s->v, 0, &s->fib)) {
	case BPF_FIB_LKUP_RET_SUCCESS:
	case BPF_FIB_LKUP_RET_NO_NEIGH:
	case BPF_FIB_LKUP_RET_NOT_FWDED: /* this node's address */
		return REASON_FORWARDED;
	case BPF_FIB_LKUP_RET_FWD_DISABLED:
		return REASON_NO_FORWARDING;
	default:
		return REASON_NO_ROUTE;
	}
}

/* explain_route looks up the route of the verdict's packet. If there is none, the verdict becomes a drop. */
static __always_inline enum reason explain_route(void *ctx, struct scratch *s)
{
	struct verdict *v = &s->v;

	s->fib.ifindex = 0;
	if (v->action != ACTION_FORWARD)
		return v->reason;
	if (v->local)
		return explain_delivery(ctx, s);
	route_resolve(ctx, s->p.l3len + encap_overhead(v), &s->p, v, v->hash % NEXT_HOP_PATHS, &s->fib);
	return v->reason;
}

/* explain_reply turns the verdict into the one on the backend's reply. */
static __always_inline enum reason explain_reply(void *ctx, struct scratch *s)
{
	const struct tuple *t = &s->p.key.t;
	struct verdict *v = &s->v;

	s->fib.ifindex = 0;
	if (v->action != ACTION_FORWARD || v->method != METHOD_NAT)
		return REASON_NONE;
	if (!(addr_kinds(&v->t.dst) & ADDR_BACKEND) || !bpf_map_lookup_elem(&sy_servers, &v->t.dst))
		return REASON_NOT_OURS;
	if (addr_kinds(&v->t.src) & ADDR_OWN && !snat_is_used(v->t.sport))
		return REASON_NOT_OURS;
	/* The stack sends the reply of a backend on this node, so its source is the backend. */
	v->t.src = v->local ? v->t.dst : t->dst;
	v->t.dst = t->src;
	return explain_route(ctx, s);
}

/* explain_reroute finds the route by which egress_reroute sends the reply. The verdict is the one on the reply. */
static __always_inline void explain_reroute(void *ctx, struct scratch *s, struct explained *e)
{
	struct vip *vip = bpf_map_lookup_elem(&sy_vips, &s->p.key.t.dst);

	e->reply_via = 0;
	if (!vip || !vip->by_source || !s->v.local || e->reply != REASON_FORWARDED)
		return;
	s->v.t.src = s->p.key.t.dst;
	if (route_resolve(ctx, s->p.l3len, &s->p, &s->v, 0, &s->fib) == ROUTE_NONE)
		e->reply = s->v.reason;
	else
		e->reply_via = s->fib.ifindex;
}
