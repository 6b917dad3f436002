/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/* trace: a record of each packet that the filter selects, with its verdict and its first bytes before and after. The
 * objects trace.bpf.c and inside_trace.bpf.c share the maps sy_trace, sy_trace_count and sy_trace_ring, so their
 * packets have one order and one limit. */
#pragma once
#include "act.h"

#define TRACE_BYTES 192 /* enough for the inner TCP header behind the longest headers of a tunnel */
#define TRACE_VIPS 4

/* Written by the agent. */
struct trace_config {
	__u64 until; /* CLOCK_MONOTONIC_COARSE in ns; the agent moves it on, so nothing is recorded without an agent */
	struct addr client; /* zero: any */
	struct addr vips[TRACE_VIPS]; /* an address may be repeated; none is zero */
	__u32 limit; /* records per second */
	__u8 any_vip; /* 1: vips does not apply */
	__u8 drops; /* 1: only packets that are dropped or refused */
	__u8 by_service; /* 1: only packets for which trace_of_service holds */
	__u8 pad;
};

/* Written by the programs. */
struct trace_count {
	__u64 second, packets; /* the current second, and the packets in it */
	__u64 over_limit, ring_full; /* packets that were not recorded, and why */
};

enum trace_hook {
	TRACE_XDP,
	TRACE_TC_IN,
	TRACE_TC_OUT,
	TRACE_PROXY, /* the service proxy, at ingress */
	TRACE_PROXY_OUT, /* and at egress */
};

/* Where a service or an endpoint of the service proxy listens. */
struct trace_at {
	struct addr addr;
	__be16 port;
	__u8 proto; /* IPPROTO_* */
	__u8 pad;
};

enum trace_active {
	TRACE_NOT, /* the filter does not select the current packet */
	TRACE_BEGUN, /* it may */
	TRACE_JUDGED, /* and the record has the verdict */
};

struct trace_head {
	__u64 time; /* CLOCK_MONOTONIC in ns */
	__u32 ifindex, egress; /* egress, 0: the stack, or none */
	__u32 frontend, backend; /* ids; see counted */
	struct trace_at service, endpoint; /* instead of ids, TRACE_PROXY and TRACE_PROXY_OUT; see counted */
	__u32 len, len_after; /* of the frame; len_after, 0: it was dropped */
	__u8 action; /* enum action */
	__u8 reason; /* enum reason */
	__u8 method; /* enum method */
	__u8 counted, reply; /* as in struct verdict */
	__u8 hook; /* enum trace_hook */
	__u8 active; /* enum trace_active */
	__u8 pad;
};

struct trace_record {
	struct trace_head head;
	__u8 before[TRACE_BYTES], after[TRACE_BYTES]; /* the first bytes of the frame */
};

ARRAY(struct trace_config, 1) sy_trace SEC(".maps");
ARRAY(struct trace_count, 1) sy_trace_count SEC(".maps");

/* The record of the current packet. */
PERCPU_ARRAY(struct trace_record, 1) sy_trace_record SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_RINGBUF);
	__uint(max_entries, 8 << 20); /* 17,000 records */
} sy_trace_ring SEC(".maps");

static __always_inline struct trace_record *trace_record(void)
{
	__u32 zero = 0;

	return bpf_map_lookup_elem(&sy_trace_record, &zero);
}

/* trace_judge stores the verdict in the record. */
static __always_inline void trace_judge(struct trace_head *h, const struct verdict *v)
{
	h->action = v->action;
	h->reason = v->reason;
	h->method = v->method;
	h->counted = v->counted;
	h->reply = v->reply;
	h->frontend = v->frontend;
	h->backend = v->backend;
	h->active = TRACE_JUDGED;
}

/* Addresses and protocol of a frame. */
struct trace_ip {
	struct addr src, dst;
	__u32 proto;
};

/* trace_parse reads a frame without a VLAN tag. */
static __always_inline int trace_parse(const void *data, const void *end, struct trace_ip *ip)
{
	const struct ethhdr *eth = data;
	const struct ip6hdr *ip6 = (void *)(eth + 1);
	const struct iphdr *ip4 = (void *)(eth + 1);

	if ((void *)(ip4 + 1) > end)
		return 0;
	if (eth->proto == bpf_htons(ETH_P_IP)) {
		ip->src = addr_v4mapped(ip4->src);
		ip->dst = addr_v4mapped(ip4->dst);
		ip->proto = ip4->proto;
		return 1;
	}
	if (eth->proto != bpf_htons(ETH_P_IPV6) || (void *)(ip6 + 1) > end)
		return 0;
	__builtin_memcpy(&ip->src, &ip6->src, sizeof(ip->src));
	__builtin_memcpy(&ip->dst, &ip6->dst, sizeof(ip->dst));
	ip->proto = ip6->next;
	return 1;
}

static __always_inline int trace_is_vip(const struct trace_config *c, const struct addr *a)
{
	if (c->any_vip)
		return 1;
	for (int i = 0; i < TRACE_VIPS; i++)
		if (addr_equal(c->vips[i].w, a->w))
			return 1;
	return 0;
}

static __always_inline int trace_is_client(const struct trace_config *c, const struct addr *a)
{
	return addr_is_zero(&c->client) || addr_equal(c->client.w, a->w);
}

/* trace_selects reports whether the filter selects packets between two addresses. */
static __always_inline int trace_selects(const struct trace_config *c, const struct addr *a, const struct addr *b)
{
	return (trace_is_client(c, a) && trace_is_vip(c, b)) || (trace_is_client(c, b) && trace_is_vip(c, a));
}

/* What each object defines: whether the filter may select a packet that arrives with these addresses, and whether a
 * packet belongs to the service that is traced. */
static __always_inline int trace_may_select(const struct trace_config *c, const struct trace_ip *ip);
static __always_inline int trace_of_service(const struct trace_head *h);

/* trace_copy copies the first bytes of the frame. If that is bare, it begins with the IP header, and gets an Ethernet
 * header without addresses. */
static __always_inline int trace_copy(void *ctx, enum hook hook, __u8 *to, __u32 len, const int bare)
{
	const __u32 most = bare ? TRACE_BYTES - sizeof(struct ethhdr) : TRACE_BYTES;
	__u64 n = len < most ? len : most;

	barrier_var(n); /* keeps one comparison for each bound, which the verifier of Linux 6.1 needs */
	if (n > most)
		return 0;
	barrier_var(n);
	if (n < sizeof(struct ethhdr))
		return 0;
	if (bare) {
		struct ethhdr *eth = (void *)to;

		*eth = (struct ethhdr){ .proto = ((struct __sk_buff *)ctx)->protocol };
		to += sizeof(*eth);
	}
	return !(hook == HOOK_XDP ? bpf_xdp_load_bytes(ctx, 0, to, n) : bpf_skb_load_bytes(ctx, 0, to, n));
}

/* trace_begin stores the packet as it arrives if the filter may select it. */
static __always_inline int trace_begin(void *ctx, enum hook hook, __u32 len, const int bare)
{
	__u32 zero = 0;
	struct trace_config *c = bpf_map_lookup_elem(&sy_trace, &zero);
	struct trace_record *t = trace_record();
	struct scratch *s = scratch_get();
	struct trace_ip ip;

	if (!c || !t || !s)
		return 0;
	t->head.active = TRACE_NOT;
	if (!bare && trace_parse(act_data(ctx, hook), act_data_end(ctx, hook), &ip) && !trace_may_select(c, &ip))
		return 0;
	if (bpf_ktime_get_coarse_ns() > c->until || !trace_copy(ctx, hook, t->before, len, bare))
		return 0;
	s->p.key.t.src = s->p.key.t.dst = (struct addr){};
	s->v.reason = REASON_NONE; /* until there is a verdict */
	s->v.counted = s->v.method = s->v.reply = s->v.local = 0;
	s->fib.ifindex = 0;
	t->head.len = len + (bare ? sizeof(struct ethhdr) : 0);
	t->head.active = TRACE_BEGUN;
	return 1;
}

static __always_inline int trace_is_drop(__u8 a)
{
	return a == ACTION_DROP || a == ACTION_RESET || a == ACTION_REFUSE || a == ACTION_TOO_BIG;
}

/* trace_matches reports whether the filter selects a packet after all, now that its flow and verdict are known. */
static __always_inline int trace_matches(const struct trace_config *c, const struct trace_record *t,
					 const struct scratch *s)
{
	const struct trace_head *h = &t->head;
	struct trace_ip ip;

	if (h->reason == REASON_NONE || (h->reason == REASON_NOT_OURS && addr_is_zero(&c->client)) ||
	    (c->drops && !trace_is_drop(h->action)) || (c->by_service && !trace_of_service(h)))
		return 0;
	return trace_selects(c, &s->p.key.t.src, &s->p.key.t.dst) ||
	       (trace_parse(t->before, t->before + TRACE_BYTES, &ip) && trace_selects(c, &ip.src, &ip.dst)) ||
	       (t->head.len_after && trace_parse(t->after, t->after + TRACE_BYTES, &ip) &&
		trace_selects(c, &ip.src, &ip.dst));
}

/* trace_admit reports whether the packet is within the limit. CPUs that begin a second at the same time admit a few
 * more. */
static __always_inline int trace_admit(const struct trace_config *c, struct trace_count *n)
{
	__u64 second = bpf_ktime_get_coarse_ns() / SECOND;

	if (n->second != second) {
		n->second = second;
		n->packets = 0;
	}
	if (__sync_fetch_and_add(&n->packets, 1) < c->limit)
		return 1;
	__sync_fetch_and_add(&n->over_limit, 1);
	return 0;
}

/* trace_end sends the record of a packet that trace_begin has stored, and whose verdict is in the record. where is enum
 * trace_hook. */
static __always_inline int trace_end(void *ctx, enum hook hook, __u32 len, int bare, int where, __u32 ifindex,
				     __u32 egress)
{
	__u32 zero = 0;
	struct trace_config *c = bpf_map_lookup_elem(&sy_trace, &zero);
	struct trace_count *n = bpf_map_lookup_elem(&sy_trace_count, &zero);
	struct trace_record *t = trace_record();
	struct scratch *s = scratch_get();

	if (!c || !n || !t || !s)
		return 0;
	struct trace_head *h = &t->head;

	h->active = TRACE_NOT;
	h->len_after = 0;
	if (h->action != ACTION_DROP && (bare ? trace_copy(ctx, hook, t->after, len, 1) :
						trace_copy(ctx, hook, t->after, len, 0)))
		h->len_after = len + (bare ? sizeof(struct ethhdr) : 0);
	if (!trace_matches(c, t, s) || !trace_admit(c, n))
		return 0;
	h->time = bpf_ktime_get_ns();
	h->ifindex = ifindex;
	h->egress = egress;
	h->hook = where;
	if (bpf_ringbuf_output(&sy_trace_ring, t, sizeof(*t), BPF_RB_NO_WAKEUP))
		__sync_fetch_and_add(&n->ring_full, 1);
	return 0;
}
