/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/* Routes and neighbours, as the kernel has them. */
#pragma once
#include "encap.h"
#include "scratch.h"

enum route {
	ROUTE_OK,
	ROUTE_NO_NEIGHBOUR, /* the next hop has no neighbour entry */
	ROUTE_NONE, /* the verdict is no longer to forward */
};

static __always_inline enum route route_drop(struct verdict *v, enum reason r)
{
	verdict_drop(v, r);
	return ROUTE_NONE;
}

/* route_too_big makes the verdict an ICMP error with the MTU for the sender. mtu is that of the path, tunnel
 * included. */
static __always_inline enum route route_too_big(const struct pkt *p, struct verdict *v, __u32 mtu)
{
	__u32 least = p->v6 ? MIN_MTU : 68; /* RFC 8200, 5; RFC 791, 3.2 */

	route_drop(v, REASON_TOO_BIG);
	if (pkt_without_l4(p))
		return ROUTE_NONE;
	v->action = ACTION_TOO_BIG;
	v->mtu = mtu > encap_overhead(v) + least ? mtu - encap_overhead(v) : least;
	return ROUTE_NONE;
}

#define PMTU_LIFETIME (600 * SECOND) /* RFC 1191, 6.3; RFC 8201, 4 */

/* route_fits_pmtu reports whether a packet of len bytes fits the path MTU to a backend, as far as it is known. */
static __always_inline int route_fits_pmtu(const struct verdict *v, __u32 len, __u32 *mtu)
{
	struct pmtu *path;

	if (v->method < METHOD_IPIP || len <= MIN_MTU)
		return 1;
	path = bpf_map_lookup_elem(&sy_pmtu, &v->t.dst);
	if (!path || !path->mtu || len <= path->mtu || bpf_ktime_get_coarse_ns() - path->seen > PMTU_LIFETIME)
		return 1;
	*mtu = path->mtu;
	return 0;
}

/* route_on_link reports whether the server of a DSR packet is the next hop itself and not behind a router. */
static __always_inline int route_on_link(const struct verdict *v, const struct bpf_fib_lookup *fib)
{
	if (v->method != METHOD_DSR)
		return 1;
	if (fib->family == AF_INET)
		return fib->ipv4_dst == v->t.dst.w[3];
	return addr_equal(fib->ipv6_dst, v->t.dst.w);
}

/* route_lookup fills fib for a packet whose largest segment has len bytes, from the IP header on. */
static __always_inline enum route route_lookup(void *ctx, __u32 ifindex, __u32 len, const struct pkt *p,
					       struct verdict *v, struct bpf_fib_lookup *fib)
{
	__u32 mtu = 0;
	enum route r = ROUTE_OK;

	if (p->ttl <= 1)
		return route_drop(v, REASON_TTL_EXPIRED);
	len += encap_overhead(v);
	if (!route_fits_pmtu(v, len, &mtu))
		return route_too_big(p, v, mtu);
	__builtin_memset(fib, 0, sizeof(*fib));
	fib->ifindex = ifindex;
	fib->l4_protocol = v->method == METHOD_GUE ? IPPROTO_UDP : p->key.proto;
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
	switch (bpf_fib_lookup(ctx, fib, sizeof(*fib), 0)) {
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
		return route_drop(v, REASON_NO_ROUTE);
	}
	return route_on_link(v, fib) ? r : route_drop(v, REASON_NOT_ON_LINK);
}
