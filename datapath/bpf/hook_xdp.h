/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/* How XDP accesses and resizes a packet. */
#pragma once
#include "encap.h"

/* The frame up to its IP header: MAC addresses and up to two VLAN tags. */
struct l2 {
	__u8 macs[2 * ETH_ALEN];
	__be16 types[5];
};

static __always_inline void l2_set_type(struct l2 *l2, const struct pkt *p, __be16 type)
{
	if (p->l3 == sizeof(struct ethhdr))
		l2->types[0] = type;
	else if (p->l3 == sizeof(struct ethhdr) + sizeof(struct vlan))
		l2->types[2] = type;
	else
		l2->types[4] = type;
}

/* xdp_has_frags reports whether a frame continues in other buffers. Programs can access only the first one. */
static __always_inline int xdp_has_frags(struct xdp_md *ctx, const struct pkt *p)
{
	return xdp_frags && p->len > (__u32)(ctx->data_end - ctx->data);
}

/* xdp_push inserts size bytes before the IP header and sets the ethertype. */
static __always_inline int xdp_push(struct xdp_md *ctx, const struct pkt *p, const struct verdict *v, const void *outer,
				    __u32 size)
{
	if (bpf_xdp_adjust_head(ctx, -(int)size))
		return 0;
	void *data = (void *)(long)ctx->data, *end = (void *)(long)ctx->data_end;
	void *l3 = data + L3(p);

	__u64 *to = data, *from = data + size;

	_Static_assert(sizeof(struct l2) <= 3 * sizeof(*to), "three words are copied");
	if ((void *)(from + 3) > end || l3 + size > end)
		return 0;
	__u64 a = from[0], b = from[1], c = from[2];

	to[0] = a;
	to[1] = b;
	to[2] = c; /* the surplus is overwritten below */
	l2_set_type(data, p, addr_is_v4(&v->t.dst) ? bpf_htons(ETH_P_IP) : bpf_htons(ETH_P_IPV6));
	__builtin_memcpy(l3, outer, size);
	return 1;
}

/* xdp_decap removes n bytes of outer headers and sets the ethertype. */
static __always_inline int xdp_decap(struct xdp_md *ctx, const struct pkt *p, __u32 n, __be16 type)
{
	void *data = (void *)(long)ctx->data, *end = (void *)(long)ctx->data_end;
	struct l2 l2;

	if (data + sizeof(l2) > end || !decap_prepare(data, end, p, n, n, type))
		return 0;
	__builtin_memcpy(&l2, data, sizeof(l2));
	l2_set_type(&l2, p, type);
	if (bpf_xdp_adjust_head(ctx, n & 1023))
		return 0;
	data = (void *)(long)ctx->data;
	end = (void *)(long)ctx->data_end;
	if (data + sizeof(l2) > end)
		return 0;
	if (p->l3 == sizeof(struct ethhdr))
		__builtin_memcpy(data, &l2, sizeof(struct ethhdr));
	else if (p->l3 == sizeof(struct ethhdr) + sizeof(struct vlan))
		__builtin_memcpy(data, &l2, sizeof(struct ethhdr) + sizeof(struct vlan));
	else
		__builtin_memcpy(data, &l2, sizeof(l2));
	return 1;
}

/* xdp_load copies size bytes of the packet from offset off. */
static __always_inline int xdp_load(struct xdp_md *ctx, __u32 off, void *to, __u32 size)
{
	void *from = (void *)(long)ctx->data + off;

	if (from + size > (void *)(long)ctx->data_end)
		return 0;
	__builtin_memcpy(to, from, size);
	return 1;
}

/* xdp_replace_tail makes the packet end with these size bytes at offset off. */
static __always_inline int xdp_replace_tail(struct xdp_md *ctx, const struct pkt *p, __u32 off, const void *from,
					    __u32 size)
{
	if (bpf_xdp_adjust_tail(ctx, (int)(off + size) - (int)p->len))
		return 0;
	void *to = (void *)(long)ctx->data + off;

	if (to + size > (void *)(long)ctx->data_end)
		return 0;
	__builtin_memcpy(to, from, size);
	return 1;
}

static __always_inline int xdp_rewrite_csum(struct xdp_md *ctx, const struct pkt *p, const struct tuple *t)
{
	void *data = (void *)(long)ctx->data, *end = (void *)(long)ctx->data_end;
	__sum16 *csum = data + (csum_offset(p) & 1023);

	if ((void *)(csum + 1) > end)
		return 0;
	if (*csum || p->key.proto == IPPROTO_TCP) { /* a UDP checksum of 0 means none (RFC 768) */
		const __u32 *from = (const __u32 *)&p->key.t, *to = (const __u32 *)t;
		__u64 sum = csum_change(from + 8, to + 8, 1, (__u16) ~*csum); /* the ports */

		if (p->v6)
			sum = csum_change(from, to, 8, sum);
		else
			sum = csum_change(from + 3, to + 3, 1, csum_change(from + 7, to + 7, 1, sum));
		__u16 c = ~csum_fold64(sum);

		*csum = c || p->key.proto == IPPROTO_TCP ? c : 0xffff;
	}
	return 1;
}
