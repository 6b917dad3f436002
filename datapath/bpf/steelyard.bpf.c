// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause
//go:build ignore
/* Entry points: parse → decide → (route) → commit → act. No logic here. */
#include <linux/bpf.h>
#include <bpf/bpf_helpers.h>
#include "act_xdp.h"
#include "out.h"

/* How much of a packet must be in one piece for us to look at it. */
#define HEADERS 128

static __always_inline struct flow *look(void *data, void *end, struct work *w)
{
	enum reason parsed = parse(data, end, &w->p);

	join(&w->p);
	return decide(&w->p, parsed, &w->v);
}

SEC("xdp")
int sy_xdp(struct xdp_md *ctx)
{
	void *data = (void *)(long)ctx->data, *end = (void *)(long)ctx->data_end;
	struct work *w = begin(end - data);

	return w ? act_xdp(ctx, w, look(data, end, w)) : XDP_ABORTED;
}

static __always_inline void pull(struct __sk_buff *skb)
{
	if ((void *)(long)skb->data + HEADERS > (void *)(long)skb->data_end)
		bpf_skb_pull_data(skb, skb->len < HEADERS ? skb->len : HEADERS);
}

SEC("tc")
int sy_tc_in(struct __sk_buff *skb)
{
	struct work *w = begin(skb->len);

	if (!w)
		return TC_ACT_SHOT;
	pull(skb);
	return act_tc(skb, w, look((void *)(long)skb->data, (void *)(long)skb->data_end, w));
}

/* What this machine sends by itself. */
SEC("tc")
int sy_tc_out(struct __sk_buff *skb)
{
	if (!tunnel_end && !is_probe(skb)) /* all that is forwarded comes by here, too */
		return TC_ACT_UNSPEC;
	struct work *w = begin(skb->len);

	if (!w)
		return TC_ACT_UNSPEC;
	pull(skb);
	if (parse((void *)(long)skb->data, (void *)(long)skb->data_end, &w->p) != REASON_NONE)
		return TC_ACT_UNSPEC;
	int r = out_probe(skb, w);

	if (r >= 0)
		return r;
	out_clamp(skb, &w->p);
	return TC_ACT_UNSPEC;
}

/* explain writes the verdict over the head of the packet and changes nothing else. */
SEC("xdp")
int sy_explain(struct xdp_md *ctx)
{
	void *data = (void *)(long)ctx->data, *end = (void *)(long)ctx->data_end;
	struct work *w = begin(end - data);

	if (!w)
		return XDP_ABORTED;
	look(data, end, w);
	data = (void *)(long)ctx->data;
	if (data + sizeof(w->v) > (void *)(long)ctx->data_end)
		return XDP_ABORTED;
	__builtin_memcpy(data, &w->v, sizeof(w->v));
	return XDP_PASS;
}

char _license[] SEC("license") = "Dual BSD/GPL";
