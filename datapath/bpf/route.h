/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/* Where a rewritten packet goes: the kernel's own routes and neighbours. */
#pragma once
#include "decide.h"

enum route {
	ROUTE_OK,
	ROUTE_NO_NEIGHBOUR, /* the address of the next hop is not resolved yet */
	ROUTE_NONE, /* the verdict is now a drop */
};

static __always_inline enum route no_route(struct verdict *v, enum reason r)
{
	v->action = ACTION_DROP;
	v->reason = r;
	v->commit = COMMIT_NONE;
	return ROUTE_NONE;
}

/* route fills fib. len is the length to hold against the MTU; 0 leaves that to the kernel. */
static __always_inline enum route route(void *ctx, __u32 ifindex, __u16 len, const struct pkt *p, struct verdict *v,
					struct bpf_fib_lookup *fib)
{
	if (p->ttl <= 1)
		return no_route(v, REASON_TTL);
	__builtin_memset(fib, 0, sizeof(*fib));
	fib->ifindex = ifindex;
	fib->l4_protocol = p->key.proto;
	fib->tot_len = len;
	if (p->v6) {
		fib->family = AF_INET6;
		__builtin_memcpy(fib->ipv6_src, &v->t.src, sizeof(fib->ipv6_src));
		__builtin_memcpy(fib->ipv6_dst, &v->t.dst, sizeof(fib->ipv6_dst));
	} else {
		fib->family = AF_INET;
		fib->ipv4_src = v->t.src.w[3];
		fib->ipv4_dst = v->t.dst.w[3];
	}
	switch (bpf_fib_lookup(ctx, fib, sizeof(*fib), 0)) {
	case BPF_FIB_LKUP_RET_SUCCESS:
		return ROUTE_OK;
	case BPF_FIB_LKUP_RET_NO_NEIGH:
		return ROUTE_NO_NEIGHBOUR;
	case BPF_FIB_LKUP_RET_FWD_DISABLED:
		return no_route(v, REASON_NO_FORWARDING);
	case BPF_FIB_LKUP_RET_FRAG_NEEDED:
		return no_route(v, REASON_TOO_BIG);
	default:
		return no_route(v, REASON_NO_ROUTE);
	}
}
