/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/* The tc hook. If a next hop has no neighbour entry, the kernel resolves it. */
#pragma once
#include "act.h"
#include "commit.h"
#include "route.h"

/* Index of the program that continues with a packet after its tunnel headers were removed. */
#define PROG_TC_DECAP 0

/* Programs for tail calls. */
struct {
	__uint(type, BPF_MAP_TYPE_PROG_ARRAY);
	__uint(key_size, sizeof(__u32));
	__uint(value_size, sizeof(__u32));
	__uint(max_entries, 1);
} sy_progs SEC(".maps");

/* Marks a tunnel packet from its redirect until sy_tc_out, which drops other packets to the tunnel port. The kernel
 * clears marks between network namespaces, so pods cannot set this one. */
#define TUNNEL_MARK 0x53580000

__noinline int parse_tc(struct __sk_buff *skb)
{
	return parse_packet(skb, HOOK_TC, skb->len);
}

static __always_inline void tc_pull(struct __sk_buff *skb, __u32 size)
{
	if ((void *)(long)skb->data + size > (void *)(long)skb->data_end)
		bpf_skb_pull_data(skb, skb->len < size ? skb->len : size);
}

/* tc_redirect_neigh sends a packet whose next hop has no neighbour entry. With METHOD_DSR the next hop is the
 * server; otherwise the kernel takes it from the packet. */
static __always_inline int tc_redirect_neigh(const struct verdict *v, const struct bpf_fib_lookup *fib)
{
	struct bpf_redir_neigh hop = { .nh_family = fib->family };

	if (v->method != METHOD_DSR)
		return bpf_redirect_neigh(fib->ifindex, 0, 0, 0);
	if (fib->family == AF_INET)
		hop.ipv4_nh = fib->ipv4_dst;
	else
		__builtin_memcpy(hop.ipv6_nh, fib->ipv6_dst, sizeof(hop.ipv6_nh));
	return bpf_redirect_neigh(fib->ifindex, &hop, sizeof(hop), 0);
}

__noinline int tc_transform(struct __sk_buff *skb)
{
	return act_transform(skb, HOOK_TC);
}

__noinline int tc_answer(struct __sk_buff *skb)
{
	return act_answer(skb, HOOK_TC);
}

static __always_inline int tc_internal_error(void)
{
	verdict_internal_error();
	return TC_ACT_SHOT;
}

/* tc_deliver rewrites a packet from or to a backend on this node and passes it to the stack. */
static __always_inline int tc_deliver(struct __sk_buff *skb, struct scratch *s)
{
	s->p.keep_ttl = 1;
	return tc_transform(skb) ? TC_ACT_UNSPEC : tc_internal_error();
}

/* tc_as_from_lo hands a packet to the kernel as if it had arrived on lo, whose MAC address is all zeros. The kernel
 * delivers it, or forwards and fragments it like a router. */
static __always_inline int tc_as_from_lo(struct __sk_buff *skb)
{
	const __u8 macs[2 * ETH_ALEN] = {};

	if (bpf_skb_store_bytes(skb, 0, macs, sizeof(macs), 0))
		return tc_internal_error();
	return bpf_redirect(LOOPBACK_IFINDEX, BPF_F_INGRESS);
}

static __always_inline int tc_forward(struct __sk_buff *skb, const struct verdict *v, const struct bpf_fib_lookup *fib,
				      enum route r)
{
	if (!tc_transform(skb))
		return tc_internal_error();
	if (tunnel_decap && v->method == METHOD_GUE)
		skb->mark = TUNNEL_MARK;
	if (r == ROUTE_NO_NEIGHBOUR)
		return tc_redirect_neigh(v, fib);
	if (r == ROUTE_FRAGMENT)
		return tc_as_from_lo(skb);

	struct ethhdr *eth = (void *)(long)skb->data;

	if ((void *)(eth + 1) > (void *)(long)skb->data_end)
		return TC_ACT_SHOT;
	mac_copy(eth->dst, fib->dmac);
	mac_copy(eth->src, fib->smac);
	return bpf_redirect(fib->ifindex, 0);
}

/* tc_segment_len returns the length of one segment on the wire, starting at the IP header. */
static __always_inline __u32 tc_segment_len(struct __sk_buff *skb, const struct pkt *p)
{
	if (!skb->gso_size)
		return p->l3len;
	if (p->key.proto == IPPROTO_TCP)
		return p->l3len - p->payload + skb->gso_size;
	return p->l4 - p->l3 + sizeof(struct udphdr) + skb->gso_size;
}

/* tc_decap_vip removes the tunnel headers of a packet to a VIP and continues in sy_tc_decap. */
static __always_inline int tc_decap_vip(struct __sk_buff *skb, struct scratch *s, __u32 n, __be16 type)
{
	decap_read_chain((void *)(long)skb->data, (void *)(long)skb->data_end, &s->p, &s->in);
	if (tc_decap(skb, n, decap_max_overhead(&s->p, &s->in, n), type))
		bpf_tail_call(skb, &sy_progs, PROG_TC_DECAP);
	return tc_internal_error();
}

/* tc_send_back sends an answer to the packet's sender. The sender of a decapsulated packet is behind a route, not on
 * the link. */
static __always_inline int tc_send_back(struct __sk_buff *skb, const struct decap_ctx *in)
{
	return in ? bpf_redirect_neigh(skb->ifindex, 0, 0, 0) : bpf_redirect(skb->ifindex, 0);
}

static __always_inline int act_tc(struct __sk_buff *skb, struct scratch *s, struct flow *f, const struct decap_ctx *in)
{
	const struct pkt *p = &s->p;
	struct verdict *v = &s->v;
	enum route r = ROUTE_NONE;
	__be16 type = 0;
	__u32 n = 0;

	/* Before tc, the kernel moves one VLAN tag out of the frame, so this is a second one. */
	if (p->l3 != sizeof(struct ethhdr) && v->action != ACTION_PASS && v->action != ACTION_DROP)
		route_drop(v, REASON_VLAN_TAGGED);
	if (v->action == ACTION_FORWARD && v->local)
		r = ROUTE_OK;
	else if (v->action == ACTION_FORWARD)
		r = route_lookup(skb, tc_segment_len(skb, p), p, v, &s->fib);
	/* On another link, the tag would denote another network. The kernel forwards fragments without the tag. */
	if (r != ROUTE_NONE && skb->vlan_present && !v->local &&
	    (r == ROUTE_FRAGMENT || s->fib.ifindex != skb->ifindex))
		r = route_drop(v, REASON_VLAN_TAGGED);
	if (r == ROUTE_FRAGMENT)
		s->p.keep_ttl = 1;
	if (r != ROUTE_NONE || v->commit == COMMIT_PMTU || (local_delivery && v->commit == COMMIT_FORGET))
		commit((struct flow_side *)f);
	if (v->action == ACTION_DECAP)
		n = decap_parse((void *)(long)skb->data, (void *)(long)skb->data_end, p, v, &type);
	if (v->action > ACTION_FORWARD)
		answer_ratelimit();
	if (v->reason != REASON_NOT_OURS)
		verdict_count(p, v);
	switch (v->action) {
	case ACTION_FORWARD:
		return v->local ? tc_deliver(skb, s) : tc_forward(skb, v, &s->fib, r);
	case ACTION_DECAP:
		if (local_delivery && v->local)
			return tc_decap_vip(skb, s, n, type);
		return tc_decap(skb, n, n, type) ? TC_ACT_UNSPEC : tc_internal_error();
	case ACTION_PASS:
		return TC_ACT_UNSPEC; /* run the next program on this interface */
	case ACTION_DROP:
		return TC_ACT_SHOT;
	default:
		return tc_answer(skb) ? tc_send_back(skb, in) : tc_internal_error();
	}
}
