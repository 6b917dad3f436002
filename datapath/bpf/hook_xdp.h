/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/* How XDP accesses and resizes a packet. */
#pragma once
#include "encap.h"

/* xdp_has_frags reports whether a frame continues in other buffers. Programs can access only the first one. */
static __always_inline int xdp_has_frags(struct xdp_md *ctx, const struct pkt *p)
{
	return xdp_frags && p->len > (__u32)(ctx->data_end - ctx->data);
}

/* xdp_push inserts size bytes before the IP header and sets the ethertype. */
static __always_inline int xdp_push(struct xdp_md *ctx, const struct verdict *v, const void *outer, __u32 size)
{
	if (bpf_xdp_adjust_head(ctx, -(int)size))
		return 0;
	void *data = (void *)(long)ctx->data, *end = (void *)(long)ctx->data_end;
	struct ethhdr *eth = data, *old = data + size;

	if ((void *)(old + 1) > end || (void *)(eth + 1) + size > end)
		return 0;
	struct ethhdr macs = *old;

	*eth = macs;
	eth->proto = addr_is_v4(&v->t.dst) ? bpf_htons(ETH_P_IP) : bpf_htons(ETH_P_IPV6);
	__builtin_memcpy(eth + 1, outer, size);
	return 1;
}

/* xdp_decap removes n bytes of outer headers and sets the ethertype. */
static __always_inline int xdp_decap(struct xdp_md *ctx, const struct pkt *p, __u32 n, __be16 type)
{
	void *data = (void *)(long)ctx->data, *end = (void *)(long)ctx->data_end;
	struct ethhdr *eth = data, *inner = data + (n & 1023);

	if ((void *)(eth + 1) > end || (void *)(inner + 1) > end || !decap_prepare(data, end, p, n, n, type))
		return 0;
	*inner = *eth;
	inner->proto = type;
	return !bpf_xdp_adjust_head(ctx, n & 1023);
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

/* xdp_replace_tail writes size bytes at offset off and makes the packet end there. */
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
		__u64 sum = csum_change(from + 8, to + 8, 1, (__u16) ~*csum); /* ports */

		if (p->v6)
			sum = csum_change(from, to, 8, sum);
		else
			sum = csum_change(from + 3, to + 3, 1, csum_change(from + 7, to + 7, 1, sum));
		__u16 c = ~csum_fold64(sum);

		*csum = c || p->key.proto == IPPROTO_TCP ? c : 0xffff;
	}
	return 1;
}
