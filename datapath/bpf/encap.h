/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/* Tunnel headers. With IPIP only the outer IP header is used. */
#pragma once
#include "decide.h"
#include "rewrite.h"

/* GUE private data between our nodes, which other receivers skip. The token proves that the sender has a key of the
 * cluster. The chain follows unless it is empty. */
struct private_head {
	__u8 magic, n, passed, pad;
	__u32 token[2]; /* a 64-bit token, aligned to 32 bits */
};

#define PRIVATE_MAGIC 0x5d

struct private4 {
	struct private_head head;
	__be32 next[CHAIN_MAX];
};

struct private6 {
	struct private_head head;
	struct addr next[CHAIN_MAX];
};

struct outer4 {
	struct iphdr ip;
	struct udphdr udp;
	struct guehdr gue;
	struct private4 private;
};

struct outer6 {
	struct ip6hdr ip;
	struct udphdr udp;
	struct guehdr gue;
	struct private6 private;
};

#define OUTER_TTL 64

/* encap_private_size returns the size of the private data: nothing, the head, or everything (max). */
static __always_inline __u32 encap_private_size(const struct verdict *v, __u32 max)
{
	if (v->chain.n)
		return max;
	return v->keyed ? sizeof(struct private_head) : 0;
}

/* encap_overhead returns the number of bytes that a method adds to a packet. */
static __always_inline __u32 encap_overhead(const struct verdict *v)
{
	const __u32 max4 = sizeof(struct private4), max6 = sizeof(struct private6);

	if (v->method == METHOD_IPIP)
		return addr_is_v4(&v->t.dst) ? sizeof(struct iphdr) : sizeof(struct ip6hdr);
	if (v->method == METHOD_GUE && addr_is_v4(&v->t.dst))
		return sizeof(struct outer4) - max4 + encap_private_size(v, max4);
	if (v->method == METHOD_GUE)
		return sizeof(struct outer6) - max6 + encap_private_size(v, max6);
	return 0;
}

static __always_inline struct tunnel_keys *tunnel_keys_get(void)
{
	__u32 zero = 0;

	return bpf_map_lookup_elem(&sy_tunnel_keys, &zero);
}

static __always_inline __u8 encap_inner_proto(const struct pkt *p)
{
	return p->v6 ? IPPROTO_IPV6 : IPPROTO_IPIP;
}

/* The outer UDP header has no checksum, because the inner packet has its own (RFC 6935, RFC 6936). */
static __always_inline void encap_gue(const struct pkt *p, const struct verdict *v, struct udphdr *udp,
				      struct guehdr *gue, struct private_head *head, __u32 private_max)
{
	__u32 private = encap_private_size(v, private_max);
	struct tunnel_keys *keys = v->keyed ? tunnel_keys_get() : 0;

	udp->sport = v->t.sport;
	udp->dport = v->t.dport;
	udp->len = bpf_htons(p->l3len + sizeof(*udp) + sizeof(*gue) + private);
	udp->csum = 0;
	gue->version_len = private / 4;
	gue->proto = encap_inner_proto(p);
	gue->flags = 0;
	*head = (struct private_head){ .magic = PRIVATE_MAGIC, .n = v->chain.n, .passed = v->chain.passed };
	if (keys) {
		head->token[0] = keys->send;
		head->token[1] = keys->send >> 32;
	}
}

/* encap_ip4 copies ECN and DSCP from the inner packet (RFC 6040, RFC 2983). */
static __always_inline void encap_ip4(const struct pkt *p, const struct verdict *v, struct iphdr *ip)
{
	/* The receiver's kernel reassembles fragments of IPIP packets (RFC 2003, 3.1; RFC 6864, 4.3). */
	int fragments = !p->dont_fragment && v->method == METHOD_IPIP;

	*ip = (struct iphdr){
		.ver_ihl = 0x45,
		.tos = p->tos,
		.len = bpf_htons(p->l3len + encap_overhead(v)),
		.id = fragments ? bpf_get_prandom_u32() : 0,
		.frag = fragments ? 0 : bpf_htons(IP_DF),
		.ttl = OUTER_TTL,
		.proto = v->method == METHOD_GUE ? IPPROTO_UDP : encap_inner_proto(p),
		.src = v->t.src.w[3],
		.dst = v->t.dst.w[3],
	};
	const __u32 *w = (const __u32 *)ip;

	ip->csum = ~csum_fold64((__u64)w[0] + w[1] + w[2] + w[3] + w[4]);
}

static __always_inline void encap_outer4(const struct pkt *p, const struct verdict *v, struct outer4 *o)
{
	encap_ip4(p, v, &o->ip);
	encap_gue(p, v, &o->udp, &o->gue, &o->private.head, sizeof(o->private));
	for (int i = 0; i < CHAIN_MAX && v->chain.n; i++)
		o->private.next[i] = v->chain.next[i].w[3];
}

/* The flow label carries the flow hash, for ECMP (RFC 6438). */
static __always_inline void encap_outer6(const struct pkt *p, const struct verdict *v, struct outer6 *o)
{
	o->ip = (struct ip6hdr){
		.ver_class_label = bpf_htonl(6U << 28 | (__u32)p->tos << 20 | (v->hash & 0xfffff)),
		.len = bpf_htons(p->l3len + encap_overhead(v) - sizeof(o->ip)),
		.hop_limit = OUTER_TTL,
		.next = v->method == METHOD_GUE ? IPPROTO_UDP : encap_inner_proto(p),
	};
	__builtin_memcpy(&o->ip.src, &v->t.src, sizeof(o->ip.src));
	__builtin_memcpy(&o->ip.dst, &v->t.dst, sizeof(o->ip.dst));
	if (v->method == METHOD_IPIP)
		return;
	encap_gue(p, v, &o->udp, &o->gue, &o->private.head, sizeof(o->private));
	if (v->chain.n)
		__builtin_memcpy(o->private.next, v->chain.next, sizeof(o->private.next));
}

/* decap_inner_dst reads the destination of the inner packet at l3. */
static __always_inline int decap_inner_dst(void *l3, void *end, __be16 type, struct addr *dst)
{
	struct iphdr *ip4 = l3;
	struct ip6hdr *ip6 = l3;

	if (type == bpf_htons(ETH_P_IP)) {
		if ((void *)(ip4 + 1) > end)
			return 0;
		*dst = addr_v4mapped(ip4->dst);
		return 1;
	}
	if ((void *)(ip6 + 1) > end)
		return 0;
	__builtin_memcpy(dst, &ip6->dst, sizeof(*dst));
	return !addr_is_v4(dst); /* ::ffff:0:0/96 would be taken for IPv4, and the kernel would route it */
}

/* decap_accepts reports whether this node accepts the decapsulated packet at l3, and sets v->local if it is for a VIP.
 * Accepted are an address that only lo has, as on a server with direct return, and a VIP that has backends on this node
 * or is itself such an address. The addresses of other interfaces belong to the node's own programs, such as sshd, and
 * a tunnel would bypass the filters in front of them. If the node forwards, it would route any other packet back. */
static __always_inline int decap_accepts(void *l3, void *end, __be16 type, struct verdict *v)
{
	struct addr dst;

	if (!decap_inner_dst(l3, end, type, &dst))
		return 0;
	__u32 *only_lo = bpf_map_lookup_elem(&sy_local_addrs, &dst);
	int loopback = only_lo && *only_lo, is_vip = bpf_map_lookup_elem(&sy_vips, &dst) != 0;

	if (!loopback && !(is_vip && local_delivery))
		return 0;
	v->local = is_vip;
	return 1;
}

static __always_inline int decap_is_ce(const struct pkt *p)
{
	return (p->tos & ECN_MASK) == ECN_CE;
}

/* decap_loses_ce reports whether the outer header has the congestion-experienced mark and the packet at l3 cannot carry
 * it. */
static __always_inline int decap_loses_ce(const struct pkt *p, void *l3, void *end, __be16 type)
{
	struct iphdr *ip4 = l3;
	struct ip6hdr *ip6 = l3;

	if (!decap_is_ce(p))
		return 0;
	if (type == bpf_htons(ETH_P_IP))
		return (void *)(ip4 + 1) > end || (ip4->tos & ECN_MASK) == ECN_NOT_ECT;
	return (void *)(ip6 + 1) > end || (bpf_ntohl(ip6->ver_class_label) >> 20 & ECN_MASK) == ECN_NOT_ECT;
}

/* decap_has_key reports whether the private data has an accepted token or none is required. */
static __always_inline int decap_has_key(const struct guehdr *gue, void *end)
{
	const struct private_head *head = (void *)(gue + 1);
	struct tunnel_keys *keys = tunnel_keys_get();

	if (!keys || !keys->required)
		return 1;
	if ((void *)(head + 1) > end || (gue->version_len & 31) < sizeof(*head) / 4 || head->magic != PRIVATE_MAGIC)
		return 0;
	__u64 token = head->token[0] | (__u64)head->token[1] << 32;

	return token && (token == keys->accept[0] || token == keys->accept[1] || token == keys->accept[2]);
}

/* decap_parse returns the length of all headers before the inner packet, starting at the outer IP header, and sets the
 * ethertype. For unknown GUE formats and packets to other destinations, the verdict becomes a drop. */
static __always_inline __u32 decap_parse(void *data, void *end, const struct pkt *p, struct verdict *v, __be16 *type)
{
	struct guehdr *gue = data + L4(p) + sizeof(struct udphdr);
	__u32 n = p->l4 - p->l3 + sizeof(struct udphdr) + sizeof(*gue);

	/* Accept version 0 data messages; skip options. */
	if ((void *)(gue + 1) <= end && !(gue->version_len & 0xe0)) {
		n += (gue->version_len & 31) * 4;
		if (gue->proto == IPPROTO_IPIP || gue->proto == IPPROTO_IPV6)
			*type = gue->proto == IPPROTO_IPIP ? bpf_htons(ETH_P_IP) : bpf_htons(ETH_P_IPV6);
	}
	void *l3 = data + L3(p) + (n & 1023);

	if (!*type || n >= p->l3len)
		verdict_set(v, ACTION_DROP, REASON_MALFORMED);
	else if (!decap_has_key(gue, end))
		verdict_set(v, ACTION_DROP, REASON_TUNNEL_KEY_MISMATCH);
	else if (!decap_accepts(l3, end, *type, v))
		verdict_set(v, ACTION_DROP, REASON_DECAP_NOT_LOCAL);
	else if (decap_loses_ce(p, l3, end, *type))
		verdict_set(v, ACTION_DROP, REASON_CONGESTION_NOT_ECT);
	return n;
}

/* decap_read_chain reads the chain from the outer headers. */
static __always_inline void decap_read_chain(void *data, void *end, const struct pkt *p, struct decap_ctx *in)
{
	struct guehdr *gue = data + L4(p) + sizeof(struct udphdr);
	struct private_head *head = (void *)(gue + 1);
	struct private4 *p4 = (void *)head;
	struct private6 *p6 = (void *)head;

	__builtin_memset(in, 0, sizeof(*in));
	in->outer_dst = p->key.t.dst;
	if ((void *)(head + 1) > end || gue->version_len < sizeof(*head) / 4 || head->magic != PRIVATE_MAGIC)
		return;
	in->chain.passed = head->passed != 0;
	if (p->v6) {
		if ((void *)(p6 + 1) > end || gue->version_len != sizeof(*p6) / 4)
			return;
		__builtin_memcpy(in->chain.next, p6->next, sizeof(p6->next));
	} else {
		if ((void *)(p4 + 1) > end || gue->version_len != sizeof(*p4) / 4)
			return;
		for (int i = 0; i < CHAIN_MAX; i++)
			in->chain.next[i] = addr_v4mapped(p4->next[i]);
	}
	in->chain.n = head->n > CHAIN_MAX ? CHAIN_MAX : head->n;
}

/* decap_max_overhead returns the overhead of n bytes plus a chain, because the MSS must suit all packets of a
 * connection. */
static __always_inline __u32 decap_max_overhead(const struct pkt *p, const struct decap_ctx *in, __u32 n)
{
	if (in->chain.n)
		return n;
	return n + (p->v6 ? sizeof(struct private6) : sizeof(struct private4)) - sizeof(struct private_head);
}

/* decap_prepare copies the congestion mark to the inner packet (RFC 6040, 4.2), which is n bytes behind the outer IP
 * header. It stores the tunnel's overhead for packets to the inner destination. */
static __always_inline int decap_prepare(void *data, void *end, const struct pkt *p, __u32 n, __u32 overhead,
					 __be16 type)
{
	void *l3 = data + L3(p) + (n & 1023);
	struct addr dst;
	__u32 *old;

	if (!decap_inner_dst(l3, end, type, &dst))
		return 0;
	old = bpf_map_lookup_elem(&sy_tunnel_hlen, &dst);
	if (!old || *old != overhead)
		bpf_map_update_elem(&sy_tunnel_hlen, &dst, &overhead, BPF_ANY);
	return !decap_is_ce(p) || rewrite_set_ce(l3, end, type == bpf_htons(ETH_P_IPV6));
}
