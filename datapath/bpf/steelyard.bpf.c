// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause
//go:build ignore
/* Entry points: parse → decide → (route) → commit → act. No logic here. */
#include <linux/bpf.h>
#include <bpf/bpf_helpers.h>
#include "act_xdp.h"
#include "out.h"

/* How much of a packet must be in one piece for us to look at it. */
#define HEADERS 192

static __always_inline int look(void *data, void *end, __u32 len)
{
	struct work *w = begin(len);

	if (!w)
		return 0;
	w->parsed = parse(data, end, &w->p);
	join(&w->p);
	return 1;
}

__noinline int look_xdp(struct xdp_md *ctx)
{
	void *data = (void *)(long)ctx->data, *end = (void *)(long)ctx->data_end;

	return look(data, end, end - data);
}

__noinline int look_tc(struct __sk_buff *skb)
{
	return look((void *)(long)skb->data, (void *)(long)skb->data_end, skb->len);
}

SEC("xdp")
int sy_xdp(struct xdp_md *ctx)
{
	struct work *w = look_xdp(ctx) ? work() : 0;

	return w ? act_xdp(ctx, w, decide(&w->p, w->parsed, &w->v, 0)) : XDP_ABORTED;
}

static __always_inline void pull(struct __sk_buff *skb)
{
	if ((void *)(long)skb->data + HEADERS > (void *)(long)skb->data_end)
		bpf_skb_pull_data(skb, skb->len < HEADERS ? skb->len : HEADERS);
}

SEC("tc")
int sy_tc_in(struct __sk_buff *skb)
{
	pull(skb);
	struct work *w = look_tc(skb) ? work() : 0;

	return w ? act_tc(skb, w, decide(&w->p, w->parsed, &w->v, 0), 0) : TC_ACT_SHOT;
}

/* What sy_tc_in has taken out of a tunnel, to be delivered or passed on. */
SEC("tc")
int sy_tc_inside(struct __sk_buff *skb)
{
	pull(skb);
	struct work *w = look_tc(skb) ? work() : 0;

	return w ? act_tc(skb, w, decide(&w->p, w->parsed, &w->v, &w->in), &w->in) : TC_ACT_SHOT;
}

/* What this machine sends by itself. */
SEC("tc")
int sy_tc_out(struct __sk_buff *skb)
{
	if (!tunnel_end && !delivers && !is_probe(skb)) /* all that is forwarded comes by here, too */
		return TC_ACT_UNSPEC;
	pull(skb);
	struct work *w = look_tc(skb) ? work() : 0;

	if (!w || w->parsed != REASON_NONE)
		return TC_ACT_UNSPEC;
	int r = out_probe(skb, w);

	if (r == OUT_OTHER && delivers)
		r = out_answer(skb, w);
	if (r != OUT_OTHER)
		return r;
	out_clamp(skb, &w->p, &w->p.key.t.src);
	return TC_ACT_UNSPEC;
}

/* explain writes the verdict over the head of the packet and changes nothing else. */
SEC("xdp")
int sy_explain(struct xdp_md *ctx)
{
	struct work *w = look_xdp(ctx) ? work() : 0;

	if (!w)
		return XDP_ABORTED;
	decide(&w->p, w->parsed, &w->v, 0);
	void *data = (void *)(long)ctx->data;

	if (data + sizeof(w->v) > (void *)(long)ctx->data_end)
		return XDP_ABORTED;
	__builtin_memcpy(data, &w->v, sizeof(w->v));
	return XDP_PASS;
}

char _license[] SEC("license") = "Dual BSD/GPL";
