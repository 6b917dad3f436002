// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause
//go:build ignore
/* These programs replace those of inside.bpf.c on the devices during a trace. They have the same names, take the same
 * steps with the same maps, and also record packets. */
#include <linux/bpf.h>
#include <bpf/bpf_helpers.h>

/* A step reports its enum reason and, for a translated packet, whether it is a reply and its enum in_way.
 * It is a global function, so its stack is in use only while it runs. */
int in_note(int reason, int reply, int way);
#define IN_NOTE in_note
#include "inside_act.h"
#include "trace.h"

/* Where the service that is traced listens. Node ports have the address ::ffff:0.0.0.0 or ::. */
HASH(struct trace_at, __u32, 4096) sy_trace_services SEC(".maps");

__noinline int in_note(int reason, int reply, int way)
{
	struct trace_record *t = trace_record();

	if (!t)
		return 0;
	t->head.reason = reason;
	if (reason == REASON_FORWARDED) {
		t->head.reply = reply;
		t->head.egress = way == IN_DEVICE ? in_device_index : 0;
	}
	return 0;
}

/* A reply's addresses do not tell its service. */
static __always_inline int trace_may_select(const struct trace_config *c, const struct trace_ip *ip)
{
	return 1;
}

static __always_inline int trace_of_service(const struct trace_head *h)
{
	struct trace_at at = h->service;

	if (!h->counted)
		return 0;
	if (bpf_map_lookup_elem(&sy_trace_services, &at))
		return 1;
	at.addr = addr_is_v4(&at.addr) ? addr_v4mapped(0) : (struct addr){};
	return bpf_map_lookup_elem(&sy_trace_services, &at) != 0;
}

__noinline int in_trace_begin(struct __sk_buff *skb, int bare)
{
	struct trace_record *t = trace_record();
	struct scratch *s = scratch_get();

	if (!t || !s)
		return 0;
	t->head.reason = REASON_NONE;
	t->head.reply = 0;
	t->head.egress = 0;
	s->v.action = ACTION_PASS; /* for a packet that in_parse does not read */
	return bare ? trace_begin(skb, HOOK_TC, skb->len, 1) : trace_begin(skb, HOOK_TC, skb->len, 0);
}

/* in_trace_judge stores the verdict: an answer or none from s->v, otherwise what the last step told. */
static __always_inline void in_trace_judge(struct trace_head *h, const struct scratch *s, int result)
{
	const struct verdict *v = &s->v;
	__u8 action = v->action;

	if (action > ACTION_FORWARD || action == ACTION_DROP)
		h->reason = v->reason;
	else if (h->reason == REASON_NONE)
		h->reason = REASON_NOT_OURS;
	else
		action = ACTION_FORWARD;
	if (result == TC_ACT_SHOT) {
		action = ACTION_DROP;
		if (h->reason == REASON_NOT_OURS || h->reason == REASON_FORWARDED)
			h->reason = REASON_INTERNAL_ERROR;
	}
	h->action = action;
	h->method = v->method;
	h->counted = h->reason == REASON_NOT_OURS ? 0 : v->method ? 2 : 1;
}

/* in_trace_sides stores where the service and the endpoint of the packet's flow listen. */
static __always_inline void in_trace_sides(struct trace_head *h, const struct scratch *s)
{
	const struct tuple *at = &s->p.key.t, *to = &s->v.t;

	h->service.proto = h->endpoint.proto = s->p.key.proto;
	if (h->reply) {
		h->service.addr = to->src;
		h->service.port = to->sport;
		h->endpoint.addr = at->src;
		h->endpoint.port = at->sport;
	} else {
		h->service.addr = at->dst;
		h->service.port = at->dport;
		h->endpoint.addr = to->dst;
		h->endpoint.port = to->dport;
	}
}

/* in_trace_end sends the record of a packet whose program has returned result. where is enum trace_hook. */
__noinline int in_trace_end(struct __sk_buff *skb, int result, int where, int bare)
{
	struct trace_record *t = trace_record();
	struct scratch *s = scratch_get();

	if (!t || !s || t->head.active == TRACE_NOT)
		return 0;
	struct trace_head *h = &t->head;
	__u32 entered = h->egress, egress = 0;

	in_trace_judge(h, s, result);
	in_trace_sides(h, s);
	if (result == TC_ACT_UNSPEC)
		egress = where == TRACE_PROXY_OUT ? skb->ifindex : 0;
	else if (h->action > ACTION_FORWARD) /* an answer to this node enters the stack */
		egress = where == TRACE_PROXY ? skb->ifindex : 0;
	else if (!entered)
		egress = s->fib.ifindex ? s->fib.ifindex : skb->ifindex;
	/* A bare packet that enters the routed device has got an Ethernet header. */
	return trace_end(skb, HOOK_TC, skb->len, bare && skb->len != h->len, where, skb->ifindex, egress);
}

SEC("tc")
int sy_in_arrive(struct __sk_buff *skb)
{
	struct in_device *from = in_device_of(skb->ifindex);

	in_trace_begin(skb, from && from->bare);
	int r = in_steps_arrive(skb, from);

	in_trace_end(skb, r, TRACE_PROXY, from && from->bare);
	return r;
}

SEC("tc")
int sy_in_leave(struct __sk_buff *skb)
{
	struct in_device *to = in_device_of(skb->ifindex);

	in_trace_begin(skb, to && to->bare);
	int r = in_steps_leave(skb, to);

	in_trace_end(skb, r, TRACE_PROXY_OUT, to && to->bare);
	return r;
}

SEC("tc")
int sy_in_send(struct __sk_buff *skb)
{
	in_trace_begin(skb, 0);
	int r = in_steps_send(skb);

	in_trace_end(skb, r, TRACE_PROXY_OUT, 0);
	return r;
}

char _license[] SEC("license") = "Dual BSD/GPL";
