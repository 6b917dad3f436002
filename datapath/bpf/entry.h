/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/* The steps of the programs on interfaces: parse → decide → (route) → commit → act. steelyard.bpf.c and trace.bpf.c are
 * built from them. */
#pragma once
#include "act_xdp.h"
#include "egress.h"
#include "fast.h"

__noinline int parse_xdp(struct xdp_md *ctx)
{
	return parse_packet(ctx, HOOK_XDP, xdp_frags ? bpf_xdp_get_buff_len(ctx) : ctx->data_end - ctx->data);
}

/* xdp_steps is a separate function so that its stack does not add to the stack of fast_xdp. */
__noinline int xdp_steps(struct xdp_md *ctx, int sampled)
{
	struct scratch *s = parse_xdp(ctx) ? scratch_get() : 0;

	if (!s)
		return XDP_ABORTED;
	s->p.sampled = sampled;
	return act_xdp(ctx, s, decide(&s->p, s->parsed, &s->v, 0, 1));
}

static __always_inline int entry_xdp(struct xdp_md *ctx)
{
	int r = fast_xdp(ctx);

	return r >= 0 ? r : xdp_steps(ctx, r == FAST_SAMPLED);
}

static __always_inline int entry_tc_in(struct __sk_buff *skb)
{
	if (skb->pkt_type !=
	    PACKET_HOST) /* for another or for several machines; the kernel would not forward it either */
		return TC_ACT_UNSPEC;
	if (skb->vlan_present && !(skb->vlan_tci & 0xfff) && bpf_skb_vlan_pop(skb)) /* VID 0 is the tag of no VLAN */
		return TC_ACT_SHOT;
	tc_pull(skb, HEADERS_MAX);
	struct scratch *s = parse_tc(skb) ? scratch_get() : 0;

	return s ? act_tc(skb, s, decide(&s->p, s->parsed, &s->v, 0, 0), 0) : TC_ACT_SHOT;
}

static __always_inline int entry_tc_decap(struct __sk_buff *skb)
{
	if (!tunnel_decap) /* no program calls this one, and the verifier omits the rest */
		return TC_ACT_SHOT;
	tc_pull(skb, HEADERS_MAX);
	struct scratch *s = parse_tc(skb) ? scratch_get() : 0;

	return s ? act_tc(skb, s, decide(&s->p, s->parsed, &s->v, &s->in, 0), &s->in) : TC_ACT_SHOT;
}

static __always_inline int entry_tc_out(struct __sk_buff *skb)
{
	if (!tunnel_decap && !local_delivery && !egress_is_probe(skb)) /* forwarded packets also pass this hook */
		return TC_ACT_UNSPEC;
	if (skb->mark == TUNNEL_MARK) {
		skb->mark = 0;
		return TC_ACT_UNSPEC;
	}
	tc_pull(skb, HEADERS_MAX);
	struct scratch *s = parse_tc(skb) ? scratch_get() : 0;

	if (s && s->parsed == REASON_MALFORMED) { /* long headers may hide a tunnel packet in non-linear pages */
		tc_pull(skb, HEADERS_LONG);
		parse_tc(skb);
	}
	if (!s || s->parsed != REASON_NONE)
		return TC_ACT_UNSPEC;
	int r = egress_probe(skb, s);

	if (r == EGRESS_NOT_MINE)
		r = egress_drop_spoofed(s);
	__u8 from = addr_kinds(&s->p.key.t.src);

	if (r == EGRESS_NOT_MINE && !from)
		return TC_ACT_UNSPEC;
	if (r == EGRESS_NOT_MINE && local_delivery && from & ADDR_BACKEND)
		r = egress_reply(skb, s);
	if (r != EGRESS_NOT_MINE)
		return r;
	egress_clamp_mss(skb, &s->p, &s->p.key.t.src);
	return TC_ACT_UNSPEC;
}
