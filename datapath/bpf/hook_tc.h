/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/* How tc accesses and resizes a packet. The packet may be GSO and its checksum may be incomplete (CHECKSUM_PARTIAL), so
 * checksums are changed with helpers that handle both. */
#pragma once
#include "encap.h"
#include "scratch.h"

static __always_inline int tc_rewrite_csum(struct __sk_buff *skb, const struct pkt *p, const struct tuple *t)
{
	__u64 udp = p->key.proto == IPPROTO_UDP ? BPF_F_MARK_MANGLED_0 : 0;
	const struct tuple *was = &p->key.t;
	__u32 off = csum_offset(p);
	/* The mapped form adds the same words to all IPv4 addresses. They cancel out, so one sum serves both families. */
	__u32 addrs = bpf_csum_diff((__be32 *)was, 32, (__be32 *)t, 32, 0);
	__u32 ports = bpf_csum_diff((__be32 *)&was->sport, 4, (__be32 *)&t->sport, 4, 0);

	return !bpf_l4_csum_replace(skb, off, 0, addrs, BPF_F_PSEUDO_HDR | udp) &&
	       !bpf_l4_csum_replace(skb, off, 0, ports, udp);
}

/* tc_csum_partial reports whether the kernel computes the transport checksum on transmit (CHECKSUM_PARTIAL). If so, a
 * change outside the pseudo-header does not change the field. Only senders on this host produce such packets. */
static __always_inline int tc_csum_partial(struct __sk_buff *skb, const struct pkt *p)
{
	__u32 off = csum_offset(p);
	__u16 before = 0, after = 0;

	bpf_skb_load_bytes(skb, off, &before, sizeof(before));
	bpf_l4_csum_replace(skb, off, 0, bpf_htons(1), 2);
	bpf_skb_load_bytes(skb, off, &after, sizeof(after));
	bpf_skb_store_bytes(skb, off, &before, sizeof(before), 0);
	return before == after;
}

/* tc_resize sets the length of the frame by cutting it at the end. This fails for a decapsulated packet whose transport
 * header offset in the skb is stale. Then it cuts after the IP header, where the caller writes new data anyway. */
static __always_inline int tc_resize(struct __sk_buff *skb, __u32 size)
{
	int more = (int)size - (int)skb->len;

	if (!bpf_skb_change_tail(skb, size, 0))
		return 1;
	return !bpf_skb_adjust_room(skb, more, BPF_ADJ_ROOM_NET, BPF_F_ADJ_ROOM_FIXED_GSO);
}

/* tc_replace_tail writes size bytes at offset off and makes the packet end there. */
static __always_inline int tc_replace_tail(struct __sk_buff *skb, __u32 off, const void *from, __u32 size)
{
	return tc_resize(skb, off + size) && !bpf_skb_store_bytes(skb, off, from, size, 0);
}

/* tc_make_room inserts size bytes before the IP header. The skb of a decapsulated packet may still be marked as
 * encapsulated, because on veth it is the sender's skb. The kernel then refuses a second mark with EALREADY, and the
 * first one remains. */
static __always_inline int tc_make_room(struct __sk_buff *skb, __u32 size, __u64 encap)
{
	long err = bpf_skb_adjust_room(skb, size, BPF_ADJ_ROOM_MAC, BPF_F_ADJ_ROOM_FIXED_GSO | encap);

	if (err == -EALREADY)
		err = bpf_skb_adjust_room(skb, size, BPF_ADJ_ROOM_MAC, BPF_F_ADJ_ROOM_FIXED_GSO);
	return !err;
}

/* tc_push inserts size bytes before the IP header. Segments of a GSO packet keep their size, because the sender's MSS
 * accounts for the tunnel. */
static __always_inline int tc_push(struct __sk_buff *skb, const struct pkt *p, const struct verdict *v,
				   const void *outer, __u32 size)
{
	int v4 = addr_is_v4(&v->t.dst);
	__u64 flags = v4 ? BPF_F_ADJ_ROOM_ENCAP_L3_IPV4 : BPF_F_ADJ_ROOM_ENCAP_L3_IPV6;
	__be16 type = v4 ? bpf_htons(ETH_P_IP) : bpf_htons(ETH_P_IPV6);

	if (v->method == METHOD_GUE)
		flags |= BPF_F_ADJ_ROOM_ENCAP_L4_UDP;
	return tc_make_room(skb, size, flags) && !bpf_skb_store_bytes(skb, p->l3, outer, size, 0) &&
	       !bpf_skb_store_bytes(skb, p->l3 - sizeof(type), &type, sizeof(type), 0);
}

#define HEADERS_DIFFER ((int)(sizeof(struct ip6hdr) - sizeof(struct iphdr)))

/* tc_decap removes n bytes of outer headers and sets the ethertype. reserve is the largest overhead that other packets
 * of the same connection may have. */
__noinline int tc_decap(struct __sk_buff *skb, __u32 n, __u32 reserve, __u32 ethertype)
{
	__be16 type = ethertype;
	struct scratch *s = scratch_get();

	if (!s)
		return 0;
	const struct pkt *p = &s->p;

	if (!decap_prepare((void *)(long)skb->data, (void *)(long)skb->data_end, p, n, reserve, type))
		return 0;
	if (type != skb->protocol) { /* replaces the outer header with an empty one of the inner family */
		if (bpf_skb_change_proto(skb, type, 0))
			return 0;
		n += type == bpf_htons(ETH_P_IP) ? -HEADERS_DIFFER : HEADERS_DIFFER;
	}
	if (bpf_skb_adjust_room(skb, -(int)(n & 1023), BPF_ADJ_ROOM_MAC, BPF_F_ADJ_ROOM_FIXED_GSO) ||
	    bpf_skb_store_bytes(skb, p->l3 - sizeof(type), &type, sizeof(type), 0))
		return 0;
	return 1;
}
