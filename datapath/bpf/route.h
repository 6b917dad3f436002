/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/* Next hops, from the kernel's routes and neighbours. */
#pragma once
#include "encap.h"
#include "scratch.h"

enum route {
	ROUTE_OK,
	ROUTE_NO_NEIGHBOUR, /* the next hop has no neighbour entry */
	ROUTE_FRAGMENT, /* the packet is too large for the path, and the kernel may fragment it */
	ROUTE_NONE, /* the verdict no longer forwards */
};

static __always_inline enum route route_drop(struct verdict *v, enum reason r)
{
	verdict_drop(v, r);
	return ROUTE_NONE;
}

/* route_may_fragment reports whether a packet may be fragmented on its way (RFC 791; RFC 2003, 3.1). The receiver
 * reassembles fragments of tunnel packets. With IPIP the receiver is a kernel, but with GUE it may be this datapath,
 * which does not reassemble. */
static __always_inline int route_may_fragment(const struct pkt *p, const struct verdict *v)
{
	return !p->dont_fragment && addr_is_v4(&v->t.dst) && (v->method == METHOD_NAT || v->method == METHOD_IPIP);
}

/* route_too_big turns the verdict into an ICMP error that tells the sender the MTU, unless the packet may be
 * fragmented. mtu is the path's and includes the tunnel headers. */
static __always_inline enum route route_too_big(const struct pkt *p, struct verdict *v, __u32 mtu)
{
	__u32 least = p->v6 ? MIN_MTU : 68; /* RFC 8200, 5; RFC 791, 3.2 */

	if (route_may_fragment(p, v))
		return ROUTE_FRAGMENT;
	route_drop(v, REASON_TOO_BIG);
	if (pkt_without_l4(p))
		return ROUTE_NONE;
	v->action = ACTION_TOO_BIG;
	v->mtu = mtu > encap_overhead(v) + least ? mtu - encap_overhead(v) : least;
	return ROUTE_NONE;
}

/* route_fits_pmtu reports whether a packet of len bytes, including tunnel headers, fits the path MTU to a backend, or
 * whether this is unknown. An IPv6 packet of MIN_MTU is never refused, because its sender would send it again. */
static __always_inline int route_fits_pmtu(const struct pkt *p, const struct verdict *v, __u32 len, __u32 *mtu)
{
	struct addr dst = v->t.dst; /* a copy, because a pointer into the verdict would keep it out of registers */
	struct pmtu *path;

	if (v->method < METHOD_IPIP || len <= MIN_MTU || (p->v6 && len <= MIN_MTU + encap_overhead(v)))
		return 1;
	path = bpf_map_lookup_elem(&sy_pmtu, &dst);
	if (!path || len <= path->mtu || !pmtu_is_fresh(path))
		return 1;
	*mtu = path->mtu;
	return 0;
}

/* route_on_link reports whether a DSR packet's next hop is the server itself rather than a router. */
static __always_inline int route_on_link(const struct verdict *v, const struct bpf_fib_lookup *fib)
{
	if (v->method != METHOD_DSR)
		return 1;
	if (fib->family == AF_INET)
		return fib->ipv4_dst == v->t.dst.w[3];
	return addr_equal(fib->ipv6_dst, v->t.dst.w);
}

/* Number of jiffies for which a next hop is cached: 25 to 250 ms, depending on the kernel's HZ. */
#define NEXT_HOP_JIFFIES 25

/* Number of paths over which flows to one destination are spread. All packets of a flow take the same path. */
#define NEXT_HOP_PATHS 16

static __always_inline struct next_hop *next_hop_slot(const struct verdict *v, __u8 path)
{
	__u32 i = (v->t.dst.w[3] ^ v->t.dst.w[1] ^ path * 0x9e3779b9) * 0x85ebca6b >> 20;

	_Static_assert(NEXT_HOPS == 1 << (32 - 20), "the index has so many bits");
	return bpf_map_lookup_elem(&sy_next_hops, &i);
}

/* route_cached uses the result of a recent lookup for a packet of len bytes. */
static __always_inline int route_cached(const struct next_hop *hop, __u8 path, __u32 len, struct verdict *v,
					struct bpf_fib_lookup *fib)
{
	if (!hop || hop->until < bpf_jiffies64() || hop->path != path || len > hop->mtu ||
	    !addr_equal(hop->dst.w, v->t.dst.w) || !addr_equal(hop->src.w, v->t.src.w))
		return 0;
	fib->ifindex = hop->ifindex;
	__builtin_memcpy(fib->smac, hop->smac, ETH_ALEN);
	__builtin_memcpy(fib->dmac, hop->dmac, ETH_ALEN);
	v->to_uplink = hop->to_uplink;
	return 1;
}

static __always_inline void route_keep(struct next_hop *hop, __u8 path, const struct verdict *v,
				       const struct bpf_fib_lookup *fib)
{
	if (!hop)
		return;
	hop->src = v->t.src;
	hop->dst = v->t.dst;
	hop->path = path;
	hop->ifindex = fib->ifindex;
	hop->mtu = fib->mtu_result < 0xffff ? fib->mtu_result : 0xffff;
	__builtin_memcpy(hop->smac, fib->smac, ETH_ALEN);
	__builtin_memcpy(hop->dmac, fib->dmac, ETH_ALEN);
	hop->to_uplink = v->to_uplink;
	hop->until = bpf_jiffies64() + NEXT_HOP_JIFFIES;
}

/* Index of lo in every network namespace. Lookups are as for packets from lo, so they need no forwarding on client
 * interfaces, and the node does not act as the clients' router. */
#define LOOPBACK_IFINDEX 1

/* route_ask asks the kernel for the next hop. The ports identify the flow if a route has several next hops
 * (fib_multipath_hash_policy = 1). */
static __always_inline long route_ask(void *ctx, __u32 len, const struct pkt *p, const struct verdict *v, __u8 path,
				      struct bpf_fib_lookup *fib)
{
	__builtin_memset(fib, 0, sizeof(*fib));
	fib->ifindex = LOOPBACK_IFINDEX;
	fib->l4_protocol = v->method == METHOD_GUE ? IPPROTO_UDP : p->key.proto;
	fib->sport = bpf_htons(0xc000 | path);
	fib->dport = bpf_htons(tunnel_port);
	fib->tot_len = len;
	if (addr_is_v4(&v->t.dst)) {
		fib->family = AF_INET;
		fib->ipv4_src = v->t.src.w[3];
		fib->ipv4_dst = v->t.dst.w[3];
	} else {
		fib->family = AF_INET6;
		__builtin_memcpy(fib->ipv6_src, &v->t.src, sizeof(fib->ipv6_src));
		__builtin_memcpy(fib->ipv6_dst, &v->t.dst, sizeof(fib->ipv6_dst));
	}
	return bpf_fib_lookup(ctx, fib, sizeof(*fib), 0);
}

/* route_resolve fills fib from the kernel's routes for a packet of len bytes, including tunnel headers. With ROUTE_OK,
 * fib has the interface and MAC addresses. With ROUTE_NO_NEIGHBOUR, it has the interface and next hop. */
static __always_inline enum route route_resolve(void *ctx, __u32 len, const struct pkt *p, struct verdict *v, __u8 path,
						struct bpf_fib_lookup *fib)
{
	enum route r = ROUTE_OK;

	switch (route_ask(ctx, len, p, v, path, fib)) {
	case BPF_FIB_LKUP_RET_SUCCESS:
		break;
	case BPF_FIB_LKUP_RET_NO_NEIGH:
		r = ROUTE_NO_NEIGHBOUR;
		break;
	case BPF_FIB_LKUP_RET_FWD_DISABLED:
		return route_drop(v, REASON_NO_FORWARDING);
	case BPF_FIB_LKUP_RET_FRAG_NEEDED:
		return route_too_big(p, v, fib->mtu_result);
	default:
		verdict_fail(p, v, REASON_NO_ROUTE);
		return ROUTE_NONE;
	}
	return route_on_link(v, fib) ? r : route_drop(v, REASON_NOT_ON_LINK);
}

/* route_lookup is route_resolve for a packet whose largest segment has len bytes, starting at the IP header. It uses
 * the result of a recent lookup if there is one. */
static __always_inline enum route route_lookup(void *ctx, __u32 len, const struct pkt *p, struct verdict *v,
					       struct bpf_fib_lookup *fib)
{
	__u8 path = v->hash % NEXT_HOP_PATHS;
	struct next_hop *hop = next_hop_slot(v, path);
	__u32 mtu = 0;

	if (p->ttl <= 1)
		return route_drop(v, REASON_TTL_EXPIRED);
	len += encap_overhead(v);
	if (!route_fits_pmtu(p, v, len, &mtu))
		return route_too_big(p, v, mtu);
	if (route_cached(hop, path, len, v, fib))
		return ROUTE_OK;
	enum route r = route_resolve(ctx, len, p, v, path, fib);

	if (r == ROUTE_OK) {
		v->to_uplink = uplink_xmits(fib->ifindex);
		route_keep(hop, path, v, fib);
	}
	return r;
}
