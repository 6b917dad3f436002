// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause
//go:build ignore
/* Entry points: parse → decide → (route) → commit → act. They contain no logic. */
#include <linux/bpf.h>
#include <bpf/bpf_helpers.h>
#include "act_xdp.h"
#include "egress.h"
#include "explain.h"
#include "fast.h"
#include "gc.h"
#include "sock.h"

/* parse_packet fills the scratch. The bounds of the packet are read again for its second header, so that the verifier
 * checks that once, and not for each way through the first. */
static __always_inline int parse_packet(void *ctx, enum hook hook, __u32 len)
{
	struct scratch *s = scratch_begin(len);

	if (!s)
		return 0;
	s->parsed = parse_l3(act_data(ctx, hook), act_data_end(ctx, hook), &s->p);
	barrier();
	if (s->parsed == REASON_NONE && s->p.fragment != FRAG_LATER)
		s->parsed = parse_l4(act_data(ctx, hook), act_data_end(ctx, hook), &s->p);
	frag_join(&s->p);
	return 1;
}

__noinline int parse_xdp(struct xdp_md *ctx)
{
	return parse_packet(ctx, HOOK_XDP, xdp_frags ? bpf_xdp_get_buff_len(ctx) : ctx->data_end - ctx->data);
}

__noinline int parse_tc(struct __sk_buff *skb)
{
	return parse_packet(skb, HOOK_TC, skb->len);
}

/* xdp_steps is a separate function so that its stack does not add to the stack of fast_xdp. */
__noinline int xdp_steps(struct xdp_md *ctx, int sampled)
{
	struct scratch *s = parse_xdp(ctx) ? scratch_get() : 0;

	if (!s)
		return XDP_ABORTED;
	s->p.sampled = sampled;
	return act_xdp(ctx, s, decide(&s->p, s->parsed, &s->v, 0, 1));
}

/* The fast path, for packets that XDP can send itself. */
SEC("xdp")
int sy_xdp(struct xdp_md *ctx)
{
	int r = fast_xdp(ctx);

	return r >= 0 ? r : xdp_steps(ctx, r == FAST_SAMPLED);
}

static __always_inline void tc_pull(struct __sk_buff *skb, __u32 size)
{
	if ((void *)(long)skb->data + size > (void *)(long)skb->data_end)
		bpf_skb_pull_data(skb, skb->len < size ? skb->len : size);
}

/* Ingress, for all packets that XDP does not handle. */
SEC("tc")
int sy_tc_in(struct __sk_buff *skb)
{
	if (skb->pkt_type !=
	    PACKET_HOST) /* for another or for several machines; the kernel would not forward it either */
		return TC_ACT_UNSPEC;
	if (skb->vlan_present && !(skb->vlan_tci & 0xfff) && bpf_skb_vlan_pop(skb)) /* VID 0 is the tag of no VLAN */
		return TC_ACT_SHOT;
	tc_pull(skb, HEADERS_MAX);
	struct scratch *s = parse_tc(skb) ? scratch_get() : 0;

	return s ? act_tc(skb, s, decide(&s->p, s->parsed, &s->v, 0, 0), 0) : TC_ACT_SHOT;
}

/* Packets to a VIP, after sy_tc_in has decapsulated them. */
SEC("tc")
int sy_tc_decap(struct __sk_buff *skb)
{
	if (!tunnel_decap) /* no program calls this one, and the verifier omits the rest */
		return TC_ACT_SHOT;
	tc_pull(skb, HEADERS_MAX);
	struct scratch *s = parse_tc(skb) ? scratch_get() : 0;

	return s ? act_tc(skb, s, decide(&s->p, s->parsed, &s->v, &s->in, 0), &s->in) : TC_ACT_SHOT;
}

/* Packets sent by this node. */
SEC("tc")
int sy_tc_out(struct __sk_buff *skb)
{
	if (!tunnel_decap && !local_delivery && !egress_is_probe(skb)) /* forwarded packets also pass this hook */
		return TC_ACT_UNSPEC;
	if (skb->mark == TUNNEL_MARK) {
		skb->mark = 0;
		return TC_ACT_UNSPEC;
	}
	tc_pull(skb, HEADERS_MAX);
	struct scratch *s = parse_tc(skb) ? scratch_get() : 0;

	if (s && s->parsed == REASON_MALFORMED) { /* long headers may hide a tunnel packet in non-linear pages */
		tc_pull(skb, HEADERS_LONG);
		parse_tc(skb);
	}
	if (!s || s->parsed != REASON_NONE)
		return TC_ACT_UNSPEC;
	int r = egress_probe(skb, s);

	if (r == EGRESS_NOT_MINE)
		r = egress_drop_spoofed(s);
	__u8 from = addr_kinds(&s->p.key.t.src);

	if (r == EGRESS_NOT_MINE && !from)
		return TC_ACT_UNSPEC;
	if (r == EGRESS_NOT_MINE && local_delivery && from & ADDR_BACKEND)
		r = egress_reply(skb, s);
	if (r != EGRESS_NOT_MINE)
		return r;
	egress_clamp_mss(skb, &s->p, &s->p.key.t.src);
	return TC_ACT_UNSPEC;
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
