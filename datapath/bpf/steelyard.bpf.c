// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause
//go:build ignore
/* Entry points: parse → decide → (route) → commit → act. No logic here. */
#include <linux/bpf.h>
#include <bpf/bpf_helpers.h>
#include "act_xdp.h"
#include "act_tc.h"

SEC("xdp")
int sy_xdp(struct xdp_md *ctx)
{
	void *data = (void *)(long)ctx->data, *end = (void *)(long)ctx->data_end;
	struct pkt p = { .len = end - data };
	struct verdict v = {};
	struct flow *f = decide(&p, parse(data, end, &p), &v);

	return act_xdp(ctx, &p, &v, f);
}

/* How much of a packet must be in one piece for us to look at it. */
#define HEADERS 128

SEC("tc")
int sy_tc_in(struct __sk_buff *skb)
{
	if ((void *)(long)skb->data + HEADERS > (void *)(long)skb->data_end)
		bpf_skb_pull_data(skb, skb->len < HEADERS ? skb->len : HEADERS);
	void *data = (void *)(long)skb->data, *end = (void *)(long)skb->data_end;
	struct pkt p = { .len = skb->len };
	struct verdict v = {};
	struct flow *f = decide(&p, parse(data, end, &p), &v);

	return act_tc(skb, &p, &v, f);
}

/* explain writes the verdict over the head of the packet and changes nothing else. */
SEC("xdp")
int sy_explain(struct xdp_md *ctx)
{
	void *data = (void *)(long)ctx->data, *end = (void *)(long)ctx->data_end;
	struct pkt p = { .len = end - data };
	struct verdict v = {};

	decide(&p, parse(data, end, &p), &v);
	data = (void *)(long)ctx->data;
	if (data + sizeof(v) > (void *)(long)ctx->data_end)
		return XDP_ABORTED;
	__builtin_memcpy(data, &v, sizeof(v));
	return XDP_PASS;
}

char _license[] SEC("license") = "Dual BSD/GPL";
