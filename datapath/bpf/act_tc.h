/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/* tc: packets may be large (GSO) and their checksum may still be missing (CHECKSUM_PARTIAL), so sums are changed by
 * helpers that know; a next hop that is not resolved is resolved by the kernel. */
#pragma once
#include "answer.h"
#include "commit.h"
#include "route.h"

static __always_inline int tc_rewrite(struct __sk_buff *skb, const struct pkt *p, const struct tuple *t)
{
	__u64 udp = p->key.proto == IPPROTO_UDP ? BPF_F_MARK_MANGLED_0 : 0;
	__u32 off = csum_offset(p);

	if (bpf_l4_csum_replace(skb, off, 0, addresses_diff(&p->key.t, t), BPF_F_PSEUDO_HDR | udp) ||
	    bpf_l4_csum_replace(skb, off, 0, ports_diff(&p->key.t, t), udp))
		return 0;
	void *data = (void *)(long)skb->data, *end = (void *)(long)skb->data_end;

	return rewrite_ports(data, end, p, t) && rewrite_l3(data, end, p, t);
}

/* unfinished reports whether the kernel will compute the transport checksum when the packet leaves: a change that is
 * not of the pseudo header then leaves the field alone. Only senders on this very machine make such packets. */
static __always_inline int unfinished(struct __sk_buff *skb, const struct pkt *p)
{
	__u32 off = csum_offset(p);
	__u16 before = 0, after = 0;

	bpf_skb_load_bytes(skb, off, &before, sizeof(before));
	bpf_l4_csum_replace(skb, off, 0, bpf_htons(1), 2);
	bpf_skb_load_bytes(skb, off, &after, sizeof(after));
	bpf_skb_store_bytes(skb, off, &before, sizeof(before), 0);
	return before == after;
}

static __always_inline int tc_reset(struct __sk_buff *skb, const struct pkt *p)
{
	struct tcphdr tcp = reset_of(p);
	__u32 sum = pseudo_sum(p, sizeof(tcp), IPPROTO_TCP);

	if (unfinished(skb, p))
		tcp.csum = fold(sum); /* the kernel adds the rest and complements */
	else
		tcp.csum = ~fold(bpf_csum_diff(0, 0, (__be32 *)&tcp, sizeof(tcp), sum));
	if (bpf_skb_change_tail(skb, p->l4 + sizeof(tcp), 0) || bpf_skb_store_bytes(skb, p->l4, &tcp, sizeof(tcp), 0))
		return 0;
	return turn_around((void *)(long)skb->data, (void *)(long)skb->data_end, p, sizeof(tcp), IPPROTO_TCP);
}

static __always_inline int tc_refuse4(struct __sk_buff *skb, const struct pkt *p)
{
	struct unreachable4 u = { .icmp = { .type = ICMP_UNREACHABLE, .code = ICMP_PORT } };

	if (p->l4 != L3 + sizeof(u.ip) || bpf_skb_load_bytes(skb, L3, &u.ip, sizeof(u.ip) + QUOTE))
		return 0;
	u.icmp.csum = ~fold(bpf_csum_diff(0, 0, (__be32 *)&u, sizeof(u), 0));
	if (bpf_skb_change_tail(skb, p->l4 + sizeof(u), 0) || bpf_skb_store_bytes(skb, p->l4, &u, sizeof(u), 0))
		return 0;
	return turn_around((void *)(long)skb->data, (void *)(long)skb->data_end, p, sizeof(u), IPPROTO_ICMP);
}

static __always_inline int tc_refuse6(struct __sk_buff *skb, const struct pkt *p)
{
	struct unreachable6 u = { .icmp = { .type = ICMP6_UNREACHABLE, .code = ICMP6_PORT } };

	if (p->l4 != L3 + sizeof(u.ip) || bpf_skb_load_bytes(skb, L3, &u.ip, sizeof(u.ip) + QUOTE))
		return 0;
	u.icmp.csum = ~fold(bpf_csum_diff(0, 0, (__be32 *)&u, sizeof(u), pseudo_sum(p, sizeof(u), IPPROTO_ICMPV6)));
	if (bpf_skb_change_tail(skb, p->l4 + sizeof(u), 0) || bpf_skb_store_bytes(skb, p->l4, &u, sizeof(u), 0))
		return 0;
	return turn_around((void *)(long)skb->data, (void *)(long)skb->data_end, p, sizeof(u), IPPROTO_ICMPV6);
}

static __always_inline int tc_refuse(struct __sk_buff *skb, const struct pkt *p)
{
	/* What the kernel would write as the UDP checksum on the way out would land in our ICMP header. */
	if (unfinished(skb, p))
		return 0;
	return p->v6 ? tc_refuse6(skb, p) : tc_refuse4(skb, p);
}

static __always_inline int tc_forward(struct __sk_buff *skb, const struct pkt *p, struct verdict *v, struct flow *f)
{
	struct bpf_fib_lookup fib;
	enum route r = route(skb, skb->ifindex, 0, p, v, &fib); /* the kernel knows the size of a GSO packet's parts */

	if (r != ROUTE_NONE)
		commit(p, v, f);
	count(p, v);
	if (v->action != ACTION_FORWARD || !tc_rewrite(skb, p, &v->t))
		return TC_ACT_SHOT;
	if (r == ROUTE_NO_NEIGHBOUR)
		return bpf_redirect_neigh(fib.ifindex, 0, 0, 0);

	struct ethhdr *eth = (void *)(long)skb->data;

	if ((void *)(eth + 1) > (void *)(long)skb->data_end)
		return TC_ACT_SHOT;
	__builtin_memcpy(eth->dst, fib.dmac, ETH_ALEN);
	__builtin_memcpy(eth->src, fib.smac, ETH_ALEN);
	return bpf_redirect(fib.ifindex, 0);
}

static __always_inline int act_tc(struct __sk_buff *skb, const struct pkt *p, struct verdict *v, struct flow *f)
{
	int ok = 0;

	switch (v->action) {
	case ACTION_FORWARD:
		return tc_forward(skb, p, v, f);
	case ACTION_PASS:
		if (v->reason != REASON_NOT_OURS)
			count(p, v);
		return TC_ACT_UNSPEC; /* whatever else is on this interface goes on */
	case ACTION_ECHO:
		ok = echo((void *)(long)skb->data, (void *)(long)skb->data_end, p);
		break;
	case ACTION_RESET:
		ok = tc_reset(skb, p);
		break;
	case ACTION_REFUSE:
		ok = tc_refuse(skb, p);
		break;
	default:
		break;
	}
	count(p, v);
	return ok ? bpf_redirect(skb->ifindex, 0) : TC_ACT_SHOT;
}
