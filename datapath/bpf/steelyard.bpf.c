// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause
//go:build ignore
/* The programs. They contain no logic. */
#include <linux/bpf.h>
#include <bpf/bpf_helpers.h>
#include "entry.h"
#include "explain.h"
#include "gc.h"
#include "sock.h"

/* The fast path, for packets that XDP can send itself. */
SEC("xdp")
int sy_xdp(struct xdp_md *ctx)
{
	return entry_xdp(ctx);
}

/* Ingress, for all packets that XDP does not handle. */
SEC("tc")
int sy_tc_in(struct __sk_buff *skb)
{
	return entry_tc_in(skb);
}

/* Packets to a VIP, after sy_tc_in has decapsulated them. */
SEC("tc")
int sy_tc_decap(struct __sk_buff *skb)
{
	return entry_tc_decap(skb);
}

/* Packets sent by this node. */
SEC("tc")
int sy_tc_out(struct __sk_buff *skb)
{
	return entry_tc_out(skb);
}

/* sy_explain overwrites the start of the packet with struct explained and changes nothing else. */
SEC("xdp")
int sy_explain(struct xdp_md *ctx)
{
	__u8 made = explain_made(ctx);
	struct scratch *s = parse_xdp(ctx) ? scratch_get() : 0;
	struct explained *e = (void *)(long)ctx->data;

	if (!s || (void *)(e + 1) > (void *)(long)ctx->data_end)
		return XDP_ABORTED;
	s->p.made = made;
	decide(&s->p, s->parsed, &s->v, explain_decap(ctx, s), 0);
	e->route = explain_route(ctx, s);
	e->ifindex = s->fib.ifindex;
	__builtin_memcpy(&e->v, &s->v, sizeof(e->v));
	e->reply = explain_reply(ctx, s);
	e->reply_ifindex = s->fib.ifindex;
	explain_reroute(ctx, s, e);
	return s->p.made == made ? XDP_PASS : XDP_ABORTED;
}

/* sy_gc removes flows for the agent, which runs it with a struct gc_list as the packet. It is not attached anywhere. */
SEC("xdp")
int sy_gc(struct xdp_md *ctx)
{
	struct gc_list *l = (void *)(long)ctx->data;

	return (void *)(l + 1) > (void *)(long)ctx->data_end ? 0 : gc_remove_all(l);
}

/* connect(2) to an IPv4 address. */
SEC("cgroup/connect4")
int sy_connect4(struct bpf_sock_addr *ctx)
{
	struct addr to = addr_v4mapped(ctx->user_ip4);
	int r = sock_connect(ctx, &to);

	ctx->user_ip4 = to.w[3];
	return r;
}

/* connect(2) to an IPv6 address, or to an IPv4 address through an IPv6 socket. */
SEC("cgroup/connect6")
int sy_connect6(struct bpf_sock_addr *ctx)
{
	struct addr to = { { ctx->user_ip6[0], ctx->user_ip6[1], ctx->user_ip6[2], ctx->user_ip6[3] } };
	int r = sock_connect(ctx, &to);

	ctx->user_ip6[0] = to.w[0];
	ctx->user_ip6[1] = to.w[1];
	ctx->user_ip6[2] = to.w[2];
	ctx->user_ip6[3] = to.w[3];
	return r;
}

/* getpeername(2) of an IPv4 socket. */
SEC("cgroup/getpeername4")
int sy_peer4(struct bpf_sock_addr *ctx)
{
	struct sock_flow *s = sock_flow_get(ctx);

	if (s) {
		ctx->user_ip4 = s->vip.w[3];
		ctx->user_port = s->port;
	}
	return SOCK_PASS;
}

/* getpeername(2) of an IPv6 socket. */
SEC("cgroup/getpeername6")
int sy_peer6(struct bpf_sock_addr *ctx)
{
	struct sock_flow *s = sock_flow_get(ctx);

	if (s) {
		ctx->user_ip6[0] = s->vip.w[0];
		ctx->user_ip6[1] = s->vip.w[1];
		ctx->user_ip6[2] = s->vip.w[2];
		ctx->user_ip6[3] = s->vip.w[3];
		ctx->user_port = s->port;
	}
	return SOCK_PASS;
}

/* close(2) of the last descriptor of a socket. */
SEC("cgroup/sock_release")
int sy_sock_release(struct bpf_sock *sk)
{
	if (bpf_get_netns_cookie(sk) == host_netns)
		sock_forget(sk);
	return SOCK_PASS;
}

char _license[] SEC("license") = "Dual BSD/GPL";
