/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/* This node's own sockets. A TCP connection to a service is opened to an endpoint at once, so its packets need no
 * translation. UDP to a service goes through the routed device, because a socket would keep a dead endpoint. Only
 * datagrams to addresses without a route to the device, such as the node's own, are translated here. Sockets of pods
 * are left alone, because their redirects (service meshes) need to see the service's address. */
#pragma once
#include "inside.h"
#include "sock.h"

struct in_sock_key {
	__u64 cookie; /* of the socket */
	struct in_endpoint endpoint;
	__u32 proto;
};

/* What the socket has addressed, by the endpoint that its packets go to. */
LRU_HASH(struct in_sock_key, struct in_endpoint, 65536) sy_in_sockets SEC(".maps");

#define IPPROTO_MPTCP 262

volatile const __u8 sock_tcp = 1; /* 0: treat TCP as UDP */

/* in_sock_proto returns the protocol of services that a socket may use, or 0 if there is none. */
static __always_inline __u8 in_sock_proto(__u32 proto)
{
	return proto == IPPROTO_UDP ? IPPROTO_UDP : proto == IPPROTO_TCP || proto == IPPROTO_MPTCP ? IPPROTO_TCP : 0;
}

/* in_sock_translate replaces the address and port of a service with an endpoint's. */
static __always_inline int in_sock_translate(struct bpf_sock_addr *ctx, struct addr *to, int v6)
{
	__u8 proto = in_sock_proto(ctx->protocol);

	if (!proto || bpf_get_netns_cookie(ctx) != host_netns || in_mode() == IN_DRAINING)
		return SOCK_PASS;
	__u32 kinds = in_addr_kinds(to), node = 0;

	if (!kinds || kinds == IN_LOCAL ||
	    ((proto == IPPROTO_UDP || !sock_tcp) && !(kinds & (IN_OWN | IN_SHARED))))
		return SOCK_PASS;
	struct in_service_key k = { .addr = *to, .port = ctx->user_port, .proto = proto };
	struct in_service *svc = bpf_map_lookup_elem(&sy_in_services, &k);

	if (!svc && kinds & IN_NODE_PORTS) {
		k.addr = v6 ? (struct addr){} : addr_v4mapped(0);
		svc = bpf_map_lookup_elem(&sy_in_services, &k);
	}
	if (!svc)
		return SOCK_PASS;
	/* Which source the kernel will choose is not known yet. The routed device judges by it. */
	if (svc->restricted && !(kinds & (IN_OWN | IN_SHARED)))
		return SOCK_PASS;
	if (!svc->endpoints && !(kinds & (IN_OWN | IN_SHARED)))
		return SOCK_PASS; /* to the routed device, which refuses or drops */
	struct in_source *src = bpf_map_lookup_elem(&sy_in_sources, &node);
	struct in_endpoint e;

	if (!src)
		return SOCK_PASS;
	struct addr client = v6 ? src->v6 : addr_v4mapped(src->v4);

	if (!in_allows(svc, &client))
		return SOCK_REFUSE;
	if (!in_choose(svc, &client, &e)) {
		if (sock_refuses)
			bpf_set_retval(-ECONNREFUSED);
		return SOCK_REFUSE;
	}
	struct in_sock_key sk = { .cookie = bpf_get_socket_cookie(ctx), .endpoint = e, .proto = proto };
	struct in_endpoint was = { .addr = *to, .port = ctx->user_port };

	bpf_map_update_elem(&sy_in_sockets, &sk, &was, BPF_ANY);
	if (svc->list) /* otherwise the agent verifies that the programs run */
		in_count(REASON_NONE);
	*to = e.addr;
	ctx->user_port = e.port;
	return SOCK_PASS;
}

/* in_sock_restore replaces an endpoint's address and port with those that the socket has addressed. */
static __always_inline void in_sock_restore(struct bpf_sock_addr *ctx, struct addr *from)
{
	struct in_sock_key k = { .cookie = bpf_get_socket_cookie(ctx), .proto = in_sock_proto(ctx->protocol),
				 .endpoint = { .addr = *from, .port = ctx->user_port } };
	struct in_endpoint *was;

	if (bpf_get_netns_cookie(ctx) != host_netns)
		return;
	was = bpf_map_lookup_elem(&sy_in_sockets, &k);
	if (!was)
		return;
	*from = was->addr;
	ctx->user_port = was->port;
}

static __always_inline int in_sock_send4(struct bpf_sock_addr *ctx)
{
	struct addr to = addr_v4mapped(ctx->user_ip4);
	int r = in_sock_translate(ctx, &to, 0);

	ctx->user_ip4 = to.w[3];
	return r;
}

static __always_inline void in_sock_set6(struct bpf_sock_addr *ctx, const struct addr *a)
{
	ctx->user_ip6[0] = a->w[0];
	ctx->user_ip6[1] = a->w[1];
	ctx->user_ip6[2] = a->w[2];
	ctx->user_ip6[3] = a->w[3];
}

static __always_inline int in_sock_send6(struct bpf_sock_addr *ctx)
{
	struct addr to = { { ctx->user_ip6[0], ctx->user_ip6[1], ctx->user_ip6[2], ctx->user_ip6[3] } };
	int r = in_sock_translate(ctx, &to, !addr_is_v4(&to));

	in_sock_set6(ctx, &to);
	return r;
}

static __always_inline int in_sock_receive4(struct bpf_sock_addr *ctx)
{
	struct addr from = addr_v4mapped(ctx->user_ip4);

	in_sock_restore(ctx, &from);
	ctx->user_ip4 = from.w[3];
	return SOCK_PASS;
}

static __always_inline int in_sock_receive6(struct bpf_sock_addr *ctx)
{
	struct addr from = { { ctx->user_ip6[0], ctx->user_ip6[1], ctx->user_ip6[2], ctx->user_ip6[3] } };

	in_sock_restore(ctx, &from);
	in_sock_set6(ctx, &from);
	return SOCK_PASS;
}
