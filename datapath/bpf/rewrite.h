/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/* Changes of the bytes of a packet that are the same for XDP and tc. */
#pragma once
#include <bpf/bpf_endian.h>
#include "parse.h"

static __always_inline __u16 fold(__u32 sum)
{
	sum = (sum & 0xffff) + (sum >> 16);
	sum = (sum & 0xffff) + (sum >> 16);
	return sum;
}

/* IPv4 addresses differ from their mapped form by words that cancel out, so one sum serves both families. */
static __always_inline __u32 addresses_diff(const struct tuple *from, const struct tuple *to)
{
	return bpf_csum_diff((__be32 *)from, 32, (__be32 *)to, 32, 0);
}

static __always_inline __u32 ports_diff(const struct tuple *from, const struct tuple *to)
{
	return bpf_csum_diff((__be32 *)&from->sport, 4, (__be32 *)&to->sport, 4, 0);
}

/* rewrite_l3 writes new addresses and one hop less (RFC 1624 for the header checksum). */
static __always_inline int rewrite_l3(void *data, void *end, const struct pkt *p, const struct tuple *t)
{
	if (p->v6) {
		struct ip6hdr *ip = data + L3;

		if ((void *)(ip + 1) > end)
			return 0;
		__builtin_memcpy(&ip->src, &t->src, sizeof(ip->src));
		__builtin_memcpy(&ip->dst, &t->dst, sizeof(ip->dst));
		ip->hops--;
		return 1;
	}
	struct iphdr *ip = data + L3;

	if ((void *)(ip + 1) > end)
		return 0;
	__be32 from[3] = { ip->src, ip->dst, 0 }, to[3] = { t->src.w[3], t->dst.w[3], 0 };

	from[2] = bpf_htonl((__u32)ip->ttl << 8);
	ip->ttl--;
	to[2] = bpf_htonl((__u32)ip->ttl << 8);
	ip->src = to[0];
	ip->dst = to[1];
	ip->csum = ~fold(bpf_csum_diff(from, sizeof(from), to, sizeof(to), (__u16)~ip->csum));
	return 1;
}

static __always_inline int rewrite_ports(void *data, void *end, const struct pkt *p, const struct tuple *t)
{
	struct udphdr *l4 = data + (p->l4 & 1023); /* TCP's ports are in the same place */

	if ((void *)(l4 + 1) > end)
		return 0;
	l4->sport = t->sport;
	l4->dport = t->dport;
	return 1;
}

/* csum_offset is where the transport checksum is in the frame. */
static __always_inline __u32 csum_offset(const struct pkt *p)
{
	return p->l4 + (p->key.proto == IPPROTO_TCP ? __builtin_offsetof(struct tcphdr, csum) :
						      __builtin_offsetof(struct udphdr, csum));
}

static __always_inline void swap_macs(struct ethhdr *eth)
{
	__u8 mac[ETH_ALEN];

	__builtin_memcpy(mac, eth->dst, ETH_ALEN);
	__builtin_memcpy(eth->dst, eth->src, ETH_ALEN);
	__builtin_memcpy(eth->src, mac, ETH_ALEN);
}

/* turn_around makes the headers below the transport those of an answer with len bytes of IP payload: addresses and
 * MACs swapped, a full TTL. It keeps options and extension headers, which say nothing that is wrong in an answer. */
static __always_inline int turn_around(void *data, void *end, const struct pkt *p, __u16 len, __u8 proto)
{
	if (data + L3 > end)
		return 0;
	swap_macs(data);
	if (p->v6) {
		struct ip6hdr *ip = data + L3;

		if ((void *)(ip + 1) > end)
			return 0;
		__builtin_memcpy(&ip->src, &p->key.t.dst, sizeof(ip->src));
		__builtin_memcpy(&ip->dst, &p->key.t.src, sizeof(ip->dst));
		ip->hops = 64;
		ip->len = bpf_htons(p->l4 - L3 - sizeof(*ip) + len);
		if (p->l4 == L3 + sizeof(*ip))
			ip->next = proto;
		return 1;
	}
	struct iphdr *ip = data + L3;

	if ((void *)(ip + 1) > end)
		return 0;
	__be32 old[5], new[5];

	__builtin_memcpy(old, ip, sizeof(old));
	ip->src = p->key.t.dst.w[3];
	ip->dst = p->key.t.src.w[3];
	ip->ttl = 64;
	ip->proto = proto;
	ip->frag = 0;
	ip->len = bpf_htons(p->l4 - L3 + len);
	__builtin_memcpy(new, ip, sizeof(new));
	ip->csum = ~fold(bpf_csum_diff(old, sizeof(old), new, sizeof(new), (__u16)~ip->csum));
	return 1;
}

/* pseudo_sum is the checksum of the pseudo header of an answer (RFC 9293, 3.1; RFC 8200, 8.1), not folded. */
static __always_inline __u32 pseudo_sum(const struct pkt *p, __u16 len, __u8 proto)
{
	__be32 tail[2] = { bpf_htonl(len), bpf_htonl(proto) };
	__u32 sum = bpf_csum_diff(0, 0, tail, sizeof(tail), 0);

	if (p->v6)
		return bpf_csum_diff(0, 0, (__be32 *)&p->key.t, 32, sum);
	__be32 v4[2] = { p->key.t.src.w[3], p->key.t.dst.w[3] };

	return bpf_csum_diff(0, 0, v4, sizeof(v4), sum);
}
