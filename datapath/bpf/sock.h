/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/* TCP connections that this machine opens to its own VIPs. Their packets would leave towards a router and be dropped
 * when they return. So the kernel connects the socket to a backend: connect(2) calls sock_connect, which replaces the
 * destination, and getpeername(2) returns the VIP. UDP is not balanced: an unconnected socket would reach another
 * backend with each datagram, and a connected one would never leave a failed backend. */
#pragma once
#include "account.h"

#define ECONNREFUSED 111

/* Results of the programs at connect(2). */
#define SOCK_REFUSE 0 /* with EPERM, unless bpf_set_retval has set another error */
#define SOCK_PASS 1

/* Sockets that are connected to a VIP, by cookie. If the map is full, a connection does not end with its server. */
HASH(__u64, struct sock_flow, 65536) sy_sockets SEC(".maps");

static __always_inline struct sock_flow *sock_flow_get(void *ctx)
{
	__u64 cookie = bpf_get_socket_cookie(ctx);

	return bpf_map_lookup_elem(&sy_sockets, &cookie);
}

static __always_inline void sock_forget(void *ctx)
{
	__u64 cookie = bpf_get_socket_cookie(ctx);
	struct sock_flow *s = bpf_map_lookup_elem(&sy_sockets, &cookie);

	if (!s)
		return;
	backend_load_add(s->backend, -1);
	bpf_map_delete_elem(&sy_sockets, &cookie);
}

/* sock_select returns the backend for a new connection, or NO_BACKEND. The source is not known yet, so affinity and the
 * hash of the source use the same address, zero, for all of this machine's connections. */
static __always_inline __u32 sock_select(const struct frontend *fe, const struct flow_key *k, __u64 now)
{
	__u32 id = fe->affinity ? affinity_lookup(fe, &k->t.src, now) : NO_BACKEND;

	if (id == NO_BACKEND)
		id = table_select(fe, k, bpf_get_prandom_u32());
	if (id != NO_BACKEND && fe->affinity)
		affinity_store(&k->t.src, fe->id, id, now);
	return id;
}

static __always_inline void sock_count(struct traffic *t)
{
	if (t) {
		t->flows++;
		t->continued++; /* checks of replies are about clients */
	}
}

/* sock_connect replaces a VIP in to with the address of a backend. */
static __always_inline int sock_connect(struct bpf_sock_addr *ctx, struct addr *to)
{
	if (ctx->protocol != IPPROTO_TCP || bpf_get_netns_cookie(ctx) != host_netns)
		return SOCK_PASS;
	struct flow_key k = { .t.dst = *to, .t.dport = ctx->user_port, .proto = IPPROTO_TCP };
	struct frontend *fe = addr_kinds(to) & ADDR_VIP ? frontend_lookup(&k, 0) : 0;

	sock_forget(ctx); /* a socket may connect again after a failure */
	if (!fe || !fe->local_clients)
		return SOCK_PASS;
	__u32 id = sock_select(fe, &k, bpf_ktime_get_coarse_ns());
	struct backend *b = id == NO_BACKEND ? 0 : backend_get(id);

	if (!b || addr_is_zero(&b->addr)) {
		if (sock_refuses)
			bpf_set_retval(-ECONNREFUSED);
		return SOCK_REFUSE;
	}
	/* The kernel will use this source, unless the socket is bound to another one. */
	if (!frontend_allows(fe, &b->snat[0]))
		return SOCK_REFUSE;
	struct sock_flow s = { .vip = *to, .port = k.t.dport, .frontend = fe->id, .backend = id };
	__u64 cookie = bpf_get_socket_cookie(ctx);

	s.generation = backend_generation(b);
	bpf_map_update_elem(&sy_sockets, &cookie, &s, BPF_ANY);
	backend_load_add(id, 1);
	sock_count(frontend_traffic(fe->id));
	sock_count(backend_traffic(id));
	*to = b->addr;
	ctx->user_port = backend_port(b, fe, k.t.dport);
	return SOCK_PASS;
}
