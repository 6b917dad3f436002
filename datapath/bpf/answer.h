/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/* Answers that we give in the name of a VIP: echo reply, TCP reset, ICMP errors. They go out where the packet
 * came in. */
#pragma once
#include "decide.h"
#include "rewrite.h"

/* reset_of is the RST for a packet of a flow that does not exist (RFC 9293, 3.10.7.1). The checksum is left out. */
static __always_inline struct tcphdr reset_of(const struct pkt *p)
{
	struct tcphdr tcp = { .sport = p->key.t.dport, .dport = p->key.t.sport, .off = 5 << 4, .flags = TCP_RST };

	if (p->flags & TCP_ACK) {
		tcp.seq = bpf_htonl(p->ack);
		return tcp;
	}
	tcp.flags |= TCP_ACK;
	tcp.ack = bpf_htonl(p->seq + p->segment + ((p->flags & TCP_SYN) != 0) + ((p->flags & TCP_FIN) != 0));
	return tcp;
}

/* How much of a packet an ICMP error quotes beyond its IP header: the ports (RFC 792 has as much). With IPv6 there may be the
 * header of a fragment before them. */
#define QUOTE 8
#define QUOTE_LONG 16

struct error4 {
	struct icmphdr icmp;
	struct iphdr ip;
	__u8 quote[QUOTE];
};

struct error6 {
	struct icmphdr icmp;
	struct ip6hdr ip;
	__u8 quote[QUOTE_LONG];
};

/* drop_extensions makes an answer begin where the IPv6 header ends. It returns how much of the packet to quote. */
static __always_inline __u32 drop_extensions(struct pkt *p)
{
	__u32 bare = p->l3 + sizeof(struct ip6hdr), quote = p->l4 == bare ? QUOTE : QUOTE_LONG;

	p->l4 = bare;
	return quote;
}

/* error_of is the head of the ICMP error that a verdict asks for: port unreachable, or what size would fit. */
static __always_inline struct icmphdr error_of(const struct pkt *p, const struct verdict *v)
{
	struct icmphdr icmp = {};

	if (v->action == ACTION_TOO_BIG) {
		icmp.type = p->v6 ? ICMP6_TOO_BIG : ICMP_UNREACHABLE;
		icmp.code = p->v6 ? 0 : ICMP_FRAG_NEEDED;
		icmp.rest = bpf_htonl(v->mtu);
	} else {
		icmp.type = p->v6 ? ICMP6_UNREACHABLE : ICMP_UNREACHABLE;
		icmp.code = p->v6 ? ICMP6_PORT : ICMP_PORT;
	}
	return icmp;
}

/* echo turns a ping around in place. Addresses in the pseudo header swap, which changes no sum; only the type does. */
static __always_inline int echo(void *data, void *end, const struct pkt *p)
{
	__u16 len = p->l3 + p->l3len - p->l4;

	if (!turn_around(data, end, p, len, p->key.proto))
		return 0;
	struct icmphdr *icmp = data + L4(p);

	if ((void *)(icmp + 1) > end)
		return 0;
	__be32 from = bpf_htonl((__u32)icmp->type << 24), to;

	icmp->type = p->v6 ? ICMP6_ECHO_REPLY : ICMP_ECHO_REPLY;
	to = bpf_htonl((__u32)icmp->type << 24);
	icmp->csum = ~fold(bpf_csum_diff(&from, 4, &to, 4, (__u16)~icmp->csum));
	return 1;
}

/* limit_answer takes what an ICMP error costs from what this CPU may still send, and makes the verdict a drop when there is
 * nothing left. */
static __always_inline void limit_answer(struct verdict *v)
{
	__u64 now = bpf_ktime_get_coarse_ns();
	__u32 zero = 0;
	struct bucket *b = bpf_map_lookup_elem(&answers, &zero);

	if (v->action != ACTION_REFUSE && v->action != ACTION_TOO_BIG)
		return;
	if (b && now - b->filled > SECOND / 10) {
		b->filled = now;
		b->left += answers_per_second / 10;
		if (b->left > answers_per_second)
			b->left = answers_per_second;
	}
	if (b && b->left) {
		b->left--;
		return;
	}
	v->action = ACTION_DROP;
	v->reason = REASON_RATE;
}
