/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/* Answers that we give in the name of a VIP: echo reply, TCP reset, ICMP port unreachable. They go out where the packet
 * came in. */
#pragma once
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

/* How much of a refused datagram is quoted: its header and 8 bytes (RFC 792). */
#define QUOTE 8

struct unreachable4 {
	struct icmphdr icmp;
	struct iphdr ip;
	__u8 quote[QUOTE];
};

struct unreachable6 {
	struct icmphdr icmp;
	struct ip6hdr ip;
	__u8 quote[QUOTE];
};

/* echo turns a ping around in place. Addresses in the pseudo header swap, which changes no sum; only the type does. */
static __always_inline int echo(void *data, void *end, const struct pkt *p)
{
	__u16 len = L3 + p->l3len - p->l4;

	if (!turn_around(data, end, p, len, p->key.proto))
		return 0;
	struct icmphdr *icmp = data + (p->l4 & 1023);

	if ((void *)(icmp + 1) > end)
		return 0;
	__be32 from = bpf_htonl((__u32)icmp->type << 24), to;

	icmp->type = p->v6 ? ICMP6_ECHO_REPLY : ICMP_ECHO_REPLY;
	to = bpf_htonl((__u32)icmp->type << 24);
	icmp->csum = ~fold(bpf_csum_diff(&from, 4, &to, 4, (__u16)~icmp->csum));
	return 1;
}
