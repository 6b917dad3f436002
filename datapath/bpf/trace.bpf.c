// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause
//go:build ignore
/* The programs that are on the interfaces instead of those of steelyard.bpf.c while packets are traced. They take the
 * same steps with the same maps, and record packets. They have the same names, so that an agent recognizes them. */
#include <linux/bpf.h>
#include <bpf/bpf_helpers.h>
#include "scratch.h"
#include "trace.h"

/* trace_shortcut stores the verdict of the shortcut through sy_xdp, which keeps it in registers. */
static __always_inline void trace_shortcut(const struct verdict *v, __u32 egress)
{
	struct trace_record *t = trace_record();
	struct scratch *s = scratch_get();

	if (!t || !s || t->head.active == TRACE_NOT)
		return;
	trace_judge(&t->head, v);
	s->fib.ifindex = egress;
}

#define TRACE_SHORTCUT trace_shortcut
#include "entry.h"

/* Ids of the frontends whose packets are recorded. */
HASH(__u32, __u32, MAX_FRONTENDS) sy_trace_fes SEC(".maps");

static __always_inline int trace_of_service(const struct trace_head *h)
{
	__u32 frontend = h->frontend;

	return h->counted && bpf_map_lookup_elem(&sy_trace_fes, &frontend);
}

/* Packets of servers, tunnel packets and ICMP errors have the addresses of their flow only after parse or act. */
static __always_inline int trace_may_select(const struct trace_config *c, const struct trace_ip *ip)
{
	return trace_selects(c, &ip->src, &ip->dst) || addr_kinds(&ip->src) & ADDR_BACKEND ||
	       addr_kinds(&ip->dst) & ADDR_OWN || ip->proto == IPPROTO_ICMP || ip->proto == IPPROTO_ICMPV6;
}

/* trace_finish sends the record. s->v has the verdict unless trace_shortcut has stored it. */
static __always_inline int trace_finish(void *ctx, enum hook hook, int where, __u32 ifindex, __u32 len)
{
	struct trace_record *t = trace_record();
	struct scratch *s = scratch_get();
	__u32 egress = 0;

	if (!t || !s || t->head.active == TRACE_NOT)
		return 0;
	if (t->head.active == TRACE_BEGUN)
		trace_judge(&t->head, &s->v);
	__u8 action = t->head.action;

	if (action == ACTION_FORWARD && !(s->v.local && where == TRACE_TC_IN))
		egress = s->fib.ifindex ? s->fib.ifindex : ifindex;
	else if (action > ACTION_FORWARD && action < ACTION_DECAP)
		egress = ifindex;
	return trace_end(ctx, hook, len, 0, where, ifindex, egress);
}

static __always_inline __u32 xdp_len(struct xdp_md *ctx)
{
	return xdp_frags ? bpf_xdp_get_buff_len(ctx) : ctx->data_end - ctx->data;
}

__noinline int trace_begin_xdp(struct xdp_md *ctx)
{
	return trace_begin(ctx, HOOK_XDP, xdp_len(ctx), 0);
}

__noinline int trace_begin_tc(struct __sk_buff *skb)
{
	return trace_begin(skb, HOOK_TC, skb->len, 0);
}

/* XDP passes a packet unchanged if tc processes it, and shortened if it has decapsulated it. */
__noinline int trace_end_xdp(struct xdp_md *ctx, int result)
{
	struct trace_record *t = trace_record();
	__u32 len = xdp_len(ctx);

	if (!t || (result == XDP_PASS && len == t->head.len))
		return 0;
	return trace_finish(ctx, HOOK_XDP, TRACE_XDP, ctx->ingress_ifindex, len);
}

__noinline int trace_end_tc(struct __sk_buff *skb, int where)
{
	return trace_finish(skb, HOOK_TC, where, skb->ifindex, skb->len);
}

/* These programs do not use the result of trace_begin, which would double the verifier's steps. */
SEC("xdp")
int sy_xdp(struct xdp_md *ctx)
{
	trace_begin_xdp(ctx);
	int r = entry_xdp(ctx);

	trace_end_xdp(ctx, r);
	return r;
}

SEC("tc")
int sy_tc_in(struct __sk_buff *skb)
{
	trace_begin_tc(skb);
	int r = entry_tc_in(skb); /* may continue in sy_tc_decap instead */

	trace_end_tc(skb, TRACE_TC_IN);
	return r;
}

/* The record has the packet as sy_tc_in has received it, and the verdict on the packet in the tunnel. */
SEC("tc")
int sy_tc_decap(struct __sk_buff *skb)
{
	int r = entry_tc_decap(skb);

	trace_end_tc(skb, TRACE_TC_IN);
	return r;
}

SEC("tc")
int sy_tc_out(struct __sk_buff *skb)
{
	trace_begin_tc(skb);
	int r = entry_tc_out(skb);

	trace_end_tc(skb, TRACE_TC_OUT);
	return r;
}

/* For Go, which reads the type from BTF. */
volatile const enum trace_hook trace_exported = TRACE_XDP;

char _license[] SEC("license") = "Dual BSD/GPL";
