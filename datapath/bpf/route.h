/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/* Where a packet goes: the kernel's own routes and neighbours. */
#pragma once
#include "encap.h"
#include "work.h"

enum route {
	ROUTE_OK,
	ROUTE_NO_NEIGHBOUR, /* the address of the next hop is not resolved yet */
	ROUTE_NONE, /* the verdict is no forwarding any more */
};

static __always_inline enum route no_route(struct verdict *v, enum reason r)
{
	v->action = ACTION_DROP;
	v->reason = r;
	v->commit = COMMIT_NONE;
	return ROUTE_NONE;
}

/* too_big tells the sender what fits, unless it would not understand. mtu is that of the way, tunnel included. */
static __always_inline enum route too_big(const struct pkt *p, struct verdict *v, __u32 mtu)
{
	__u32 least = p->v6 ? MIN_MTU : 68; /* RFC 8200, 5; RFC 791, 3.2 */

	no_route(v, REASON_TOO_BIG);
	if (is_part(p))
		return ROUTE_NONE;
	v->action = ACTION_TOO_BIG;
	v->mtu = mtu > overhead(v) + least ? mtu - overhead(v) : least;
	return ROUTE_NONE;
}

#define PATH_LIFE (600 * SECOND) /* RFC 1191, 6.3; RFC 8201, 4 */

/* fits_path reports whether a way to a backend takes a packet of len bytes, as far as routers have told us. */
static __always_inline int fits_path(const struct verdict *v, __u32 len, __u32 *mtu)
{
	struct path *path;

	if (v->method < METHOD_IPIP || len <= MIN_MTU)
		return 1;
	path = bpf_map_lookup_elem(&paths, &v->t.dst);
	if (!path || !path->mtu || len <= path->mtu || bpf_ktime_get_coarse_ns() - path->seen > PATH_LIFE)
		return 1;
	*mtu = path->mtu;
	return 0;
}

/* on_link reports whether the server of a dsr flow is what the kernel would send to, and not behind a router. */
static __always_inline int on_link(const struct verdict *v, const struct bpf_fib_lookup *fib)
{
	if (v->method != METHOD_DSR)
		return 1;
	if (fib->family == AF_INET)
		return fib->ipv4_dst == v->t.dst.w[3];
	return same_address(fib->ipv6_dst, v->t.dst.w);
}

/* route fills fib for a packet whose largest part has len bytes from its IP header on. */
static __always_inline enum route route(void *ctx, __u32 ifindex, __u32 len, const struct pkt *p, struct verdict *v,
					struct bpf_fib_lookup *fib)
{
	__u32 mtu = 0;
	enum route r = ROUTE_OK;

	if (p->ttl <= 1)
		return no_route(v, REASON_TTL);
	len += overhead(v);
	if (!fits_path(v, len, &mtu))
		return too_big(p, v, mtu);
	__builtin_memset(fib, 0, sizeof(*fib));
	fib->ifindex = ifindex;
	fib->l4_protocol = v->method == METHOD_GUE ? IPPROTO_UDP : p->key.proto;
	fib->tot_len = len;
	if (is_v4(&v->t.dst)) {
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
		return no_route(v, REASON_NO_FORWARDING);
	case BPF_FIB_LKUP_RET_FRAG_NEEDED:
		return too_big(p, v, fib->mtu_result);
	default:
		return no_route(v, REASON_NO_ROUTE);
	}
	return on_link(v, fib) ? r : no_route(v, REASON_NOT_ON_LINK);
}
