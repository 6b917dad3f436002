/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/* Changes to packets that XDP and tc share. */
#pragma once
#include <bpf/bpf_endian.h>
#include "parse.h"
#include "sctp.h"

static __always_inline __u16 csum_fold(__u32 sum)
{
	sum = (sum & 0xffff) + (sum >> 16);
	sum = (sum & 0xffff) + (sum >> 16);
	return sum;
}

/* csum_fold64 folds a sum of at most 65,536 words. */
static __always_inline __u16 csum_fold64(__u64 sum)
{
	sum = (sum & 0xffffffff) + (sum >> 32);
	sum = (sum & 0xffffffff) + (sum >> 32);
	return csum_fold(sum);
}

/* csum_change returns the unfolded sum after a change of some words (RFC 1624). For a few words it is several times
 * faster than the helper bpf_csum_diff. */
static __always_inline __u64 csum_change(const __u32 *from, const __u32 *to, int words, __u64 sum)
{
	for (int i = 0; i < words; i++)
		sum += (__u64)(__u32)~from[i] + to[i];
	return sum;
}

/* csum_ttl_less updates an IPv4 header's checksum after its TTL was decremented (RFC 1141). */
static __always_inline void csum_ttl_less(struct iphdr *ip)
{
	__u32 sum = ip->csum + bpf_htons(0x0100);

	ip->csum = sum + (sum >= 0xffff);
}

/* rewrite_l3 writes new addresses, and decrements the TTL unless the stack does (RFC 1624 for the header checksum). */
static __always_inline int rewrite_l3(void *data, void *end, const struct pkt *p, const struct tuple *t)
{
	if (p->v6) {
		struct ip6hdr *ip = data + L3(p);

		if ((void *)(ip + 1) > end)
			return 0;
		__builtin_memcpy(&ip->src, &t->src, sizeof(ip->src));
		__builtin_memcpy(&ip->dst, &t->dst, sizeof(ip->dst));
		ip->hop_limit -= !p->keep_ttl;
		return 1;
	}
	struct iphdr *ip = data + L3(p);

	if ((void *)(ip + 1) > end)
		return 0;
	__u64 sum = (__u16)~ip->csum;

	sum = csum_change(&ip->src, &t->src.w[3], 1, csum_change(&ip->dst, &t->dst.w[3], 1, sum));
	ip->src = t->src.w[3];
	ip->dst = t->dst.w[3];
	ip->csum = ~csum_fold64(sum);
	if (!p->keep_ttl) {
		csum_ttl_less(ip);
		ip->ttl--;
	}
	return 1;
}

static __always_inline int rewrite_ports(void *data, void *end, const struct pkt *p, const struct tuple *t)
{
	struct udphdr *l4 = data + L4(p); /* TCP's ports are at the same offset */

	if ((void *)(l4 + 1) > end)
		return 0;
	l4->sport = t->sport;
	l4->dport = t->dport;
	return 1;
}

/* rewrite_ttl decrements the TTL or hop limit, as a router does. */
static __always_inline int rewrite_ttl(void *data, void *end, const struct pkt *p)
{
	if (p->v6) {
		struct ip6hdr *ip = data + L3(p);

		if ((void *)(ip + 1) > end)
			return 0;
		ip->hop_limit--;
		return 1;
	}
	struct iphdr *ip = data + L3(p);

	if ((void *)(ip + 1) > end)
		return 0;
	csum_ttl_less(ip);
	ip->ttl--;
	return 1;
}

/* rewrite_set_ce sets the congestion-experienced mark of the packet at l3 (RFC 3168, 5). */
static __always_inline int rewrite_set_ce(void *l3, void *end, int v6)
{
	if (v6) {
		struct ip6hdr *ip = l3;

		if ((void *)(ip + 1) > end)
			return 0;
		ip->ver_class_label |= bpf_htonl(ECN_CE << 20);
		return 1;
	}
	struct iphdr *ip = l3;

	if ((void *)(ip + 1) > end)
		return 0;
	__be32 from = bpf_htonl((__u32)ip->tos << 16), to;

	ip->tos |= ECN_CE;
	to = bpf_htonl((__u32)ip->tos << 16);
	ip->csum = ~csum_fold(bpf_csum_diff(&from, 4, &to, 4, (__u16)~ip->csum));
	return 1;
}

/* rewrite_sctp changes the ports of an SCTP packet, whose checksum does not cover the addresses. */
static __always_inline int rewrite_sctp(void *data, void *end, const struct pkt *p, const struct tuple *t)
{
	struct sctphdr *sctp = data + L4(p);

	if ((void *)(sctp + 1) > end)
		return 0;
	__u32 from = *(__u32 *)&p->key.t.sport, to = *(__u32 *)&t->sport;

	if (sctp->csum) /* else a device computes it, of all but the field itself */
		sctp->csum ^= crc32c_change(from ^ to, p->l3 + p->l3len - p->l4);
	sctp->sport = t->sport;
	sctp->dport = t->dport;
	return 1;
}

/* The part of a quoted packet that is rewritten: the IP header and 8 bytes. */
struct quote4 {
	struct iphdr ip;
	__be16 sport, dport;
	__be16 len;
	__sum16 csum; /* UDP only */
};

struct quote6 {
	struct ip6hdr ip;
	__be16 sport, dport;
	__be16 len;
	__sum16 csum;
};

/* csum_quoted returns the UDP checksum in a quote whose addresses and ports change from was to is. The quote is too
 * short to contain a TCP checksum. */
static __always_inline __sum16 csum_quoted(const struct pkt *p, const struct tuple *was, const struct tuple *is,
					   __sum16 sum)
{
	if (p->key.proto != IPPROTO_UDP || !sum)
		return sum;
	__u16 c = ~csum_fold(bpf_csum_diff((__be32 *)was, sizeof(*was), (__be32 *)is, sizeof(*is), (__u16)~sum));

	return c ? c : 0xffff;
}

static __always_inline int rewrite_icmp_error4(void *data, void *end, const struct pkt *p, const struct tuple *was,
					       const struct tuple *is)
{
	struct icmphdr *icmp = data + L4(p);
	struct quote4 *q = (void *)(icmp + 1), new;

	if ((void *)(q + 1) > end)
		return 0;
	new = *q;
	new.ip.src = is->src.w[3];
	new.ip.dst = is->dst.w[3];
	new.ip.csum = ~csum_fold(bpf_csum_diff(&q->ip.src, 8, &new.ip.src, 8, (__u16)~q->ip.csum));
	new.sport = is->sport;
	new.dport = is->dport;
	new.csum = csum_quoted(p, was, is, new.csum);
	icmp->csum =
		~csum_fold(bpf_csum_diff((__be32 *)q, sizeof(*q), (__be32 *)&new, sizeof(new), (__u16)~icmp->csum));
	*q = new;
	return 1;
}

static __always_inline int rewrite_icmp_error6(void *data, void *end, const struct pkt *p, const struct tuple *was,
					       const struct tuple *is, const struct tuple *outer)
{
	struct ip6hdr *ip = data + L3(p);
	struct icmphdr *icmp = data + L4(p);
	struct quote6 *q = (void *)(icmp + 1), new;

	if ((void *)(ip + 1) > end || (void *)(q + 1) > end)
		return 0;
	new = *q;
	__builtin_memcpy(&new.ip.src, &is->src, sizeof(new.ip.src));
	__builtin_memcpy(&new.ip.dst, &is->dst, sizeof(new.ip.dst));
	new.sport = is->sport;
	new.dport = is->dport;
	new.csum = csum_quoted(p, was, is, new.csum);
	__u32 sum = bpf_csum_diff((__be32 *)q, sizeof(*q), (__be32 *)&new, sizeof(new), (__u16)~icmp->csum);

	*q = new;
	/* The pseudo-header has the outer addresses (RFC 4443, 2.3). */
	icmp->csum = ~csum_fold(bpf_csum_diff((__be32 *)&ip->src, 32, (__be32 *)outer, 32, csum_fold(sum)));
	return 1;
}

/* rewrite_icmp_error translates an ICMP error about a packet that was sent from here into one about the packet that was
 * received. t says what packets of the error's sender become. Whichever router sent the error, its source becomes the
 * address to which the receiver sends. */
static __always_inline int rewrite_icmp_error(void *data, void *end, const struct pkt *p, const struct tuple *t)
{
	struct tuple was = {
		.src = p->key.t.dst, .dst = p->key.t.src, .sport = p->key.t.dport, .dport = p->key.t.sport
	};
	struct tuple is = { .src = t->dst, .dst = t->src, .sport = t->dport, .dport = t->sport };

	if (!(p->v6 ? rewrite_icmp_error6(data, end, p, &was, &is, t) : rewrite_icmp_error4(data, end, p, &was, &is)))
		return 0;
	return rewrite_l3(data, end, p, t);
}

/* csum_offset returns the offset of the transport checksum in the frame. */
static __always_inline __u32 csum_offset(const struct pkt *p)
{
	return p->l4 + (p->key.proto == IPPROTO_TCP ? __builtin_offsetof(struct tcphdr, csum) :
						      __builtin_offsetof(struct udphdr, csum));
}

/* rewrite_to_answer turns the headers before the transport header into the headers of an answer with len bytes of IP
 * payload. It swaps addresses and MAC addresses and resets the TTL. Options and extension headers stay, because all of
 * them are valid in an answer. */
static __always_inline int rewrite_to_answer(void *data, void *end, const struct pkt *p, __u16 len, __u8 proto)
{
	struct ethhdr *eth = data;
	__u8 mac[ETH_ALEN];

	if ((void *)(eth + 1) > end)
		return 0;
	__builtin_memcpy(mac, eth->dst, ETH_ALEN);
	__builtin_memcpy(eth->dst, eth->src, ETH_ALEN);
	__builtin_memcpy(eth->src, mac, ETH_ALEN);
	if (p->v6) {
		struct ip6hdr *ip = data + L3(p);

		if ((void *)(ip + 1) > end)
			return 0;
		__builtin_memcpy(&ip->src, &p->key.t.dst, sizeof(ip->src));
		__builtin_memcpy(&ip->dst, &p->key.t.src, sizeof(ip->dst));
		ip->hop_limit = 64;
		ip->len = bpf_htons(p->l4 - L3(p) - sizeof(*ip) + len);
		if (p->l4 == L3(p) + sizeof(*ip))
			ip->next = proto;
		return 1;
	}
	struct iphdr *ip = data + L3(p);

	if ((void *)(ip + 1) > end)
		return 0;
	__be32 old[5], new[5];

	__builtin_memcpy(old, ip, sizeof(old));
	ip->src = p->key.t.dst.w[3];
	ip->dst = p->key.t.src.w[3];
	ip->ttl = 64;
	ip->proto = proto;
	ip->frag = 0;
	ip->len = bpf_htons(p->l4 - L3(p) + len);
	__builtin_memcpy(new, ip, sizeof(new));
	ip->csum = ~csum_fold(bpf_csum_diff(old, sizeof(old), new, sizeof(new), (__u16)~ip->csum));
	return 1;
}

/* csum_pseudo returns the unfolded checksum of an answer's pseudo-header (RFC 9293, 3.1; RFC 8200, 8.1). */
static __always_inline __u32 csum_pseudo(const struct pkt *p, __u16 len, __u8 proto)
{
	__be32 tail[2] = { bpf_htonl(len), bpf_htonl(proto) };
	__u32 sum = bpf_csum_diff(0, 0, tail, sizeof(tail), 0);

	if (p->v6)
		return bpf_csum_diff(0, 0, (__be32 *)&p->key.t, 32, sum);
	__be32 v4[2] = { p->key.t.src.w[3], p->key.t.dst.w[3] };

	return bpf_csum_diff(0, 0, v4, sizeof(v4), sum);
}
