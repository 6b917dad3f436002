/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/* Rewriting, encapsulating and answering packets, for XDP and tc. hook is a constant in each caller, so the compiler
 * keeps one branch. */
#pragma once
#include "answer.h"
#include "hook_tc.h"
#include "hook_xdp.h"

enum hook {
	HOOK_XDP,
	HOOK_TC,
};

static __always_inline void *act_data(void *ctx, enum hook hook)
{
	return (void *)(long)(hook == HOOK_XDP ? ((struct xdp_md *)ctx)->data : ((struct __sk_buff *)ctx)->data);
}

static __always_inline void *act_data_end(void *ctx, enum hook hook)
{
	return (void *)(long)(hook == HOOK_XDP ? ((struct xdp_md *)ctx)->data_end :
						 ((struct __sk_buff *)ctx)->data_end);
}

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

static __always_inline int act_load(void *ctx, enum hook hook, __u32 off, void *to, __u32 size)
{
	return hook == HOOK_XDP ? xdp_load(ctx, off, to, size) : !bpf_skb_load_bytes(ctx, off, to, size);
}

static __always_inline int act_replace_tail(void *ctx, enum hook hook, const struct pkt *p, const void *from,
					    __u32 size)
{
	return hook == HOOK_XDP ? xdp_replace_tail(ctx, p, L4(p), from, size) : tc_replace_tail(ctx, L4(p), from, size);
}

static __always_inline int act_rewrite(void *ctx, enum hook hook, const struct pkt *p, const struct tuple *t)
{
	int summed = !p->icmp_error && p->fragment != FRAG_LATER && p->key.proto != IPPROTO_SCTP;

	if (summed && !(hook == HOOK_XDP ? xdp_rewrite_csum(ctx, p, t) : tc_rewrite_csum(ctx, p, t)))
		return 0;
	void *data = act_data(ctx, hook), *end = act_data_end(ctx, hook);

	if (p->icmp_error)
		return rewrite_icmp_error(data, end, p, t);
	if (summed && !rewrite_ports(data, end, p, t))
		return 0;
	if (p->fragment != FRAG_LATER && p->key.proto == IPPROTO_SCTP && !rewrite_sctp(data, end, p, t))
		return 0;
	return rewrite_l3(data, end, p, t);
}

static __always_inline int act_push(void *ctx, enum hook hook, const struct pkt *p, const struct verdict *v,
				    const void *outer, __u32 size)
{
	return hook == HOOK_XDP ? xdp_push(ctx, v, outer, size) : tc_push(ctx, p, v, outer, size);
}

static __always_inline int act_encap4(void *ctx, enum hook hook, const struct pkt *p, const struct verdict *v,
				      struct outer4 *o)
{
	if (v->method == METHOD_IPIP) {
		encap_ip4(p, v, &o->ip);
		return act_push(ctx, hook, p, v, o, sizeof(o->ip));
	}
	encap_outer4(p, v, o);
	if (v->chain.n)
		return act_push(ctx, hook, p, v, o, sizeof(*o));
	if (v->keyed)
		return act_push(ctx, hook, p, v, o, sizeof(*o) - sizeof(o->private.next));
	return act_push(ctx, hook, p, v, o, sizeof(*o) - sizeof(o->private));
}

static __always_inline int act_encap6(void *ctx, enum hook hook, const struct pkt *p, const struct verdict *v,
				      struct outer6 *o)
{
	encap_outer6(p, v, o);
	if (v->method == METHOD_IPIP)
		return act_push(ctx, hook, p, v, o, sizeof(o->ip));
	if (v->chain.n)
		return act_push(ctx, hook, p, v, o, sizeof(*o));
	if (v->keyed)
		return act_push(ctx, hook, p, v, o, sizeof(*o) - sizeof(o->private.next));
	return act_push(ctx, hook, p, v, o, sizeof(*o) - sizeof(o->private));
}

static __always_inline int act_encap(void *ctx, enum hook hook, struct scratch *s)
{
	_Static_assert(sizeof(struct outer6) <= sizeof(s->headers), "the headers fit");
	_Static_assert(sizeof(struct outer4) <= sizeof(s->headers), "the headers fit");
	if (addr_is_v4(&s->v.t.dst))
		return act_encap4(ctx, hook, &s->p, &s->v, (void *)s->headers);
	return act_encap6(ctx, hook, &s->p, &s->v, (void *)s->headers);
}

static __always_inline int act_reset(void *ctx, enum hook hook, const struct pkt *p)
{
	struct tcphdr tcp = tcp_reset_header(p);
	__u32 sum = csum_pseudo(p, sizeof(tcp), IPPROTO_TCP);

	if (hook == HOOK_TC && tc_csum_partial(ctx, p))
		tcp.csum = csum_fold(sum); /* the kernel adds the rest and complements the sum */
	else
		tcp.csum = ~csum_fold(bpf_csum_diff(0, 0, (__be32 *)&tcp, sizeof(tcp), sum));
	return act_replace_tail(ctx, hook, p, &tcp, sizeof(tcp)) &&
	       rewrite_to_answer(act_data(ctx, hook), act_data_end(ctx, hook), p, sizeof(tcp), IPPROTO_TCP);
}

/* An ICMP error that quotes a packet with an incomplete checksum is correct as long as no device completes the
 * checksum. Receivers on this host accept it, but a network card could corrupt it. That is still better than sending no
 * error. */
static __always_inline int act_error4(void *ctx, enum hook hook, struct scratch *s)
{
	struct error4 *e = (void *)s->headers;
	const struct pkt *p = &s->p;

	_Static_assert(sizeof(*e) <= sizeof(s->headers), "the error fits");
	e->icmp = icmp_error_header(p, &s->v);
	if (p->l4 != p->l3 + sizeof(e->ip) || !act_load(ctx, hook, L3(p), &e->ip, sizeof(e->ip) + QUOTE))
		return 0;
	e->icmp.csum = ~csum_fold(bpf_csum_diff(0, 0, (__be32 *)e, sizeof(*e), 0));
	return act_replace_tail(ctx, hook, p, e, sizeof(*e)) &&
	       rewrite_to_answer(act_data(ctx, hook), act_data_end(ctx, hook), p, sizeof(*e), IPPROTO_ICMP);
}

static __always_inline int act_error6(void *ctx, enum hook hook, struct scratch *s, const __u32 quote)
{
	struct error6 *e = (void *)s->headers;
	const __u32 size = sizeof(*e) - QUOTE_LONG + quote;
	const struct pkt *p = &s->p;

	_Static_assert(sizeof(*e) <= sizeof(s->headers), "the error fits");
	e->icmp = icmp_error_header(p, &s->v);
	if (!act_load(ctx, hook, L3(p), &e->ip, sizeof(e->ip) + quote))
		return 0;
	e->icmp.csum = ~csum_fold(bpf_csum_diff(0, 0, (__be32 *)e, size, csum_pseudo(p, size, IPPROTO_ICMPV6)));
	return act_replace_tail(ctx, hook, p, e, size) &&
	       rewrite_to_answer(act_data(ctx, hook), act_data_end(ctx, hook), p, size, IPPROTO_ICMPV6);
}

/* act_transform rewrites or encapsulates the packet as the verdict specifies. */
static __always_inline int act_transform(void *ctx, enum hook hook)
{
	struct scratch *s = scratch_get();

	if (!s)
		return 0;
	const struct pkt *p = &s->p;
	const struct verdict *v = &s->v;

	if (v->method == METHOD_NAT)
		return act_rewrite(ctx, hook, p, &v->t);
	if (!rewrite_ttl(act_data(ctx, hook), act_data_end(ctx, hook), p))
		return 0;
	return v->method == METHOD_DSR || act_encap(ctx, hook, s);
}

/* act_answer turns the packet into its answer. */
static __always_inline int act_answer(void *ctx, enum hook hook)
{
	struct scratch *s = scratch_get();

	if (!s)
		return 0;
	struct pkt *p = &s->p;

	switch (s->v.action) {
	case ACTION_ECHO:
		return icmp_echo_reply(act_data(ctx, hook), act_data_end(ctx, hook), p);
	case ACTION_RESET:
		return act_reset(ctx, hook, p);
	case ACTION_REFUSE:
	case ACTION_TOO_BIG:
		if (!p->v6)
			return act_error4(ctx, hook, s);
		if (icmp_strip_extensions(p) == QUOTE)
			return act_error6(ctx, hook, s, QUOTE);
		return act_error6(ctx, hook, s, QUOTE_LONG);
	default:
		return 0;
	}
}
