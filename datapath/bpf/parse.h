/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/* parse: frame → struct pkt. It needs only the bytes, so it is the same for XDP, tc and explain. */
#pragma once
#include <bpf/bpf_endian.h>
#include "headers.h"
#include "types.h"

struct pkt {
	struct flow_key key;
	__u32 seq, ack; /* TCP, host order */
	__u32 len; /* of the frame */
	__u32 l3len; /* what the IP header says, header included */
	__u32 segment; /* TCP: bytes of payload */
	__u16 l4; /* offset of the transport header in the frame */
	__u8 v6, ttl;
	__u8 flags; /* TCP */
	__u8 icmp; /* ICMP type */
	__u8 fragment; /* 1: a part of a datagram */
	__u8 pad;
};

#define L3 ((__u32)sizeof(struct ethhdr))
#define MAX_EXTENSIONS 6

static __always_inline struct addr mapped(__be32 v4)
{
	return (struct addr){ .w = { 0, 0, bpf_htonl(0xffff), v4 } };
}

static __always_inline enum reason parse_v4(void *data, void *end, struct pkt *p)
{
	struct iphdr *ip = data + L3;

	if ((void *)(ip + 1) > end)
		return REASON_MALFORMED;
	__u32 hlen = (ip->ver_ihl & 15) * 4;

	p->l3len = bpf_ntohs(ip->len);
	if (ip->ver_ihl >> 4 != 4 || hlen < sizeof(*ip) || p->l3len < hlen)
		return REASON_MALFORMED;
	p->key.t.src = mapped(ip->src);
	p->key.t.dst = mapped(ip->dst);
	p->key.proto = ip->proto;
	p->ttl = ip->ttl;
	p->l4 = L3 + hlen;
	p->fragment = (ip->frag & bpf_htons(IP_MF | IP_OFFSET)) != 0;
	return REASON_NONE;
}

static __always_inline enum reason parse_v6(void *data, void *end, struct pkt *p)
{
	struct ip6hdr *ip = data + L3;

	if ((void *)(ip + 1) > end)
		return REASON_MALFORMED;
	__builtin_memcpy(&p->key.t.src, &ip->src, sizeof(p->key.t.src));
	__builtin_memcpy(&p->key.t.dst, &ip->dst, sizeof(p->key.t.dst));
	p->v6 = 1;
	p->ttl = ip->hops;
	p->l3len = bpf_ntohs(ip->len) + sizeof(*ip);

	__u8 next = ip->next;
	__u32 off = L3 + sizeof(*ip);

	for (int i = 0; i < MAX_EXTENSIONS; i++) {
		if (next == IPPROTO_FRAGMENT) {
			p->fragment = 1;
			break;
		}
		if (next != IPPROTO_HOPOPTS && next != IPPROTO_ROUTING && next != IPPROTO_DSTOPTS)
			break;
		struct ip6ext *x = data + off;

		if ((void *)(x + 1) > end)
			return REASON_MALFORMED;
		next = x->next;
		off += (x->len + 1) * 8;
		/* For the verifier: data + off is only followed within one packet's headers. */
		if (off > 512)
			return REASON_MALFORMED;
	}
	p->key.proto = next;
	p->l4 = off;
	return REASON_NONE;
}

static __always_inline enum reason parse_l4(void *data, void *end, struct pkt *p)
{
	void *l4 = data + (p->l4 & 1023);
	__u32 room = L3 + p->l3len > p->l4 ? L3 + p->l3len - p->l4 : 0;

	if (p->key.proto == IPPROTO_TCP) {
		struct tcphdr *tcp = l4;

		if (l4 + sizeof(*tcp) > end || room < sizeof(*tcp) || (tcp->off >> 4) * 4 < (int)sizeof(*tcp) ||
		    (__u32)(tcp->off >> 4) * 4 > room)
			return REASON_MALFORMED;
		p->key.t.sport = tcp->sport;
		p->key.t.dport = tcp->dport;
		p->seq = bpf_ntohl(tcp->seq);
		p->ack = bpf_ntohl(tcp->ack);
		p->flags = tcp->flags;
		p->segment = room - (tcp->off >> 4) * 4;
	} else if (p->key.proto == IPPROTO_UDP) {
		struct udphdr *udp = l4;

		if (l4 + sizeof(*udp) > end || room < sizeof(*udp))
			return REASON_MALFORMED;
		p->key.t.sport = udp->sport;
		p->key.t.dport = udp->dport;
	} else if (p->key.proto == (p->v6 ? IPPROTO_ICMPV6 : IPPROTO_ICMP)) {
		struct icmphdr *icmp = l4;

		if (l4 + sizeof(*icmp) > end || room < sizeof(*icmp))
			return REASON_MALFORMED;
		p->icmp = icmp->type;
	}
	return REASON_NONE;
}

/* parse fills p. REASON_NOT_OURS means that the frame is not IP; what it finds malformed may not be for us either, so
 * the caller leaves that to the stack unless the destination is an address of ours. */
static __always_inline enum reason parse(void *data, void *end, struct pkt *p)
{
	struct ethhdr *eth = data;
	enum reason r;

	if ((void *)(eth + 1) > end)
		return REASON_NOT_OURS;
	if (eth->proto == bpf_htons(ETH_P_IP))
		r = parse_v4(data, end, p);
	else if (eth->proto == bpf_htons(ETH_P_IPV6))
		r = parse_v6(data, end, p);
	else
		return REASON_NOT_OURS;
	if (r != REASON_NONE || p->fragment)
		return r;
	return parse_l4(data, end, p);
}
