/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/* The headers of tunnels. IPIP is the same as GUE's outer IP header with nothing behind it. */
#pragma once
#include "decide.h"
#include "rewrite.h"

/* The chain is GUE's private data, which receivers that do not know it skip. */
struct chain_head {
	__u8 magic, n, passed, pad;
};

#define CHAIN_MAGIC 0x5c

struct chain4 {
	struct chain_head head;
	__be32 next[CHAIN];
};

struct chain6 {
	struct chain_head head;
	struct addr next[CHAIN];
};

struct outer4 {
	struct iphdr ip;
	struct udphdr udp;
	struct guehdr gue;
	struct chain4 chain;
};

struct outer6 {
	struct ip6hdr ip;
	struct udphdr udp;
	struct guehdr gue;
	struct chain6 chain;
};

#define OUTER_TTL 64

static __always_inline int has_chain(const struct verdict *v)
{
	return v->chain.n || v->chain.passed;
}

/* overhead is how many bytes a method puts before a packet. */
static __always_inline __u32 overhead(const struct verdict *v)
{
	if (v->method == METHOD_IPIP)
		return is_v4(&v->t.dst) ? sizeof(struct iphdr) : sizeof(struct ip6hdr);
	if (v->method == METHOD_GUE && is_v4(&v->t.dst))
		return sizeof(struct outer4) - (has_chain(v) ? 0 : sizeof(struct chain4));
	if (v->method == METHOD_GUE)
		return sizeof(struct outer6) - (has_chain(v) ? 0 : sizeof(struct chain6));
	return 0;
}

static __always_inline __u8 inner_proto(const struct pkt *p)
{
	return p->v6 ? IPPROTO_IPV6 : IPPROTO_IPIP;
}

/* The UDP checksum is left out: what is inside has its own (RFC 6935, RFC 6936). */
static __always_inline void gue(const struct pkt *p, const struct verdict *v, struct udphdr *udp, struct guehdr *gue,
				struct chain_head *head, __u32 chain_size)
{
	__u32 private = has_chain(v) ? chain_size : 0;

	udp->sport = v->t.sport;
	udp->dport = v->t.dport;
	udp->len = bpf_htons(p->l3len + sizeof(*udp) + sizeof(*gue) + private);
	udp->csum = 0;
	gue->version_len = private / 4;
	gue->proto = inner_proto(p);
	gue->flags = 0;
	*head = (struct chain_head){ .magic = CHAIN_MAGIC, .n = v->chain.n, .passed = v->chain.passed };
}

/* The mark for congestion and the class of service are those of what is inside (RFC 6040, RFC 2983). */
static __always_inline void outer4(const struct pkt *p, const struct verdict *v, struct outer4 *o)
{
	o->ip = (struct iphdr){
		.ver_ihl = 0x45, .tos = p->tos, .len = bpf_htons(p->l3len + overhead(v)), .frag = bpf_htons(IP_DF), .ttl = OUTER_TTL,
		.proto = v->method == METHOD_GUE ? IPPROTO_UDP : inner_proto(p), .src = v->t.src.w[3], .dst = v->t.dst.w[3],
	};
	o->ip.csum = ~fold(bpf_csum_diff(0, 0, (__be32 *)&o->ip, sizeof(o->ip), 0));
	gue(p, v, &o->udp, &o->gue, &o->chain.head, sizeof(o->chain));
	for (int i = 0; i < CHAIN; i++)
		o->chain.next[i] = v->chain.next[i].w[3];
}

/* The flow label spreads the flows of a tunnel over paths (RFC 6438). */
static __always_inline void outer6(const struct pkt *p, const struct verdict *v, struct outer6 *o)
{
	o->ip = (struct ip6hdr){
		.ver_class_label = bpf_htonl(6U << 28 | (__u32)p->tos << 20 | (v->hash & 0xfffff)),
		.len = bpf_htons(p->l3len + overhead(v) - sizeof(o->ip)), .hops = OUTER_TTL,
		.next = v->method == METHOD_GUE ? IPPROTO_UDP : inner_proto(p),
	};
	__builtin_memcpy(&o->ip.src, &v->t.src, sizeof(o->ip.src));
	__builtin_memcpy(&o->ip.dst, &v->t.dst, sizeof(o->ip.dst));
	gue(p, v, &o->udp, &o->gue, &o->chain.head, sizeof(o->chain));
	__builtin_memcpy(o->chain.next, v->chain.next, sizeof(o->chain.next));
}

static __always_inline __be16 type_of(__u8 proto)
{
	return proto == IPPROTO_IPIP ? bpf_htons(ETH_P_IP) : proto == IPPROTO_IPV6 ? bpf_htons(ETH_P_IPV6) : 0;
}

/* whose says where a packet is to go that begins at l3 and came out of a tunnel: to this machine itself, or to a backend on
 * it. Others would go back to where they came from if the machine forwards. */
enum whose { NOBODYS, OURS, A_VIPS };

static __always_inline enum whose whose(void *l3, void *end, __be16 type)
{
	struct iphdr *ip4 = l3;
	struct ip6hdr *ip6 = l3;
	struct addr dst;

	if (type == bpf_htons(ETH_P_IP)) {
		if ((void *)(ip4 + 1) > end)
			return 0;
		dst = mapped(ip4->dst);
	} else {
		if ((void *)(ip6 + 1) > end)
			return 0;
		__builtin_memcpy(&dst, &ip6->dst, sizeof(dst));
	}
	if (delivers && bpf_map_lookup_elem(&vips, &dst))
		return A_VIPS;
	return bpf_map_lookup_elem(&own, &dst) ? OURS : NOBODYS;
}

/* tunnel_headers returns how many bytes come before the packet in a tunnel, counted from the IP header, and the ethertype of
 * that packet. What is no GUE that we know, or has nothing for us, becomes a drop. */
static __always_inline __u32 tunnel_headers(void *data, void *end, const struct pkt *p, struct verdict *v, __be16 *type)
{
	struct guehdr *gue = data + L4(p) + sizeof(struct udphdr);
	__u32 n = p->l4 - p->l3 + sizeof(struct udphdr) + sizeof(*gue);

	/* Version 0, no control message; options are skipped. */
	if ((void *)(gue + 1) <= end && !(gue->version_len & 0xe0)) {
		n += (gue->version_len & 31) * 4;
		*type = type_of(gue->proto);
	}
	if (!*type || n >= p->l3len) {
		say(v, ACTION_DROP, REASON_MALFORMED);
		return n;
	}
	switch (whose(data + L3(p) + (n & 1023), end, *type)) {
	case NOBODYS:
		say(v, ACTION_DROP, REASON_NOT_LOCAL);
		break;
	case A_VIPS:
		v->here = 1;
		break;
	case OURS:
		break;
	}
	return n;
}

/* read_inside reads from a tunnel's headers what the packet in it is to be told of. */
static __always_inline void read_inside(void *data, void *end, const struct pkt *p, struct inside *in)
{
	struct guehdr *gue = data + L4(p) + sizeof(struct udphdr);
	struct chain4 *c4 = (void *)(gue + 1);
	struct chain6 *c6 = (void *)(gue + 1);

	__builtin_memset(in, 0, sizeof(*in));
	in->self = p->key.t.dst;
	if (p->v6) {
		if ((void *)(c6 + 1) > end || gue->version_len != sizeof(*c6) / 4 || c6->head.magic != CHAIN_MAGIC)
			return;
		__builtin_memcpy(in->chain.next, c6->next, sizeof(c6->next));
		in->chain.n = c6->head.n;
		in->chain.passed = c6->head.passed != 0;
	} else {
		if ((void *)(c4 + 1) > end || gue->version_len != sizeof(*c4) / 4 || c4->head.magic != CHAIN_MAGIC)
			return;
		for (int i = 0; i < CHAIN; i++)
			in->chain.next[i] = mapped(c4->next[i]);
		in->chain.n = c4->head.n;
		in->chain.passed = c4->head.passed != 0;
	}
	if (in->chain.n > CHAIN)
		in->chain.n = CHAIN;
}

/* with_chain is how many bytes a tunnel's headers may have with a chain, given how many there are: a segment size must fit
 * all packets of a connection. */
static __always_inline __u32 with_chain(const struct pkt *p, const struct inside *in, __u32 n)
{
	if (in->chain.n || in->chain.passed)
		return n;
	return n + (p->v6 ? sizeof(struct chain6) : sizeof(struct chain4));
}

/* note_tunnelled remembers where a packet out of a tunnel was going, and how much of the tunnel's packets is not its own. */
static __always_inline void note_tunnelled(const struct addr *to, __u32 n)
{
	__u32 *known = bpf_map_lookup_elem(&tunnelled, to);

	if (!known || *known != n)
		bpf_map_update_elem(&tunnelled, to, &n, BPF_ANY);
}
