/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/* decide: struct pkt → struct verdict. It touches no packet and no context and only reads maps: XDP, tc and explain
 * run the very same code. It returns the entry of a known flow, so that commit need not look it up again: among a
 * million flows that costs more than all the rest. */
#pragma once
#include "flow.h"
#include "frontend.h"

static __always_inline struct flow *say(struct verdict *v, enum action a, enum reason r)
{
	v->action = a;
	v->reason = r;
	return 0;
}

static __always_inline struct flow *forward(struct verdict *v, struct flow *f, enum commit c)
{
	v->t = f->t;
	v->frontend = f->frontend;
	v->backend = f->backend;
	v->counted = 2;
	v->commit = c;
	say(v, ACTION_FORWARD, REASON_FORWARDED);
	return f;
}

static __always_inline int in_snat_range(__be16 port)
{
	__u16 p = bpf_ntohs(port);

	return p >= snat_first && p <= snat_last;
}

/* refuse answers in the way of the protocol, so that the client knows at once. */
static __always_inline struct flow *refuse(const struct pkt *p, struct verdict *v, enum reason r)
{
	if (p->key.proto == IPPROTO_UDP)
		return say(v, ACTION_REFUSE, r);
	/* A reset is never answered (RFC 9293, 3.5.2). */
	return say(v, p->flags & TCP_RST ? ACTION_DROP : ACTION_RESET, r);
}

static __always_inline struct flow *decide_reply(const struct pkt *p, struct verdict *v, struct flow *f)
{
	if (p->key.proto != IPPROTO_TCP)
		return forward(v, f, v->half ? COMMIT_ANSWER : COMMIT_TOUCH);
	if (p->flags & (TCP_FIN | TCP_RST))
		return forward(v, f, COMMIT_CLOSE);
	if (v->half && (p->flags & (TCP_SYN | TCP_ACK)) == (TCP_SYN | TCP_ACK))
		return forward(v, f, COMMIT_ANSWER);
	return forward(v, f, COMMIT_TOUCH);
}

/* A client of a half-open flow: it has proved itself when it acknowledges the number that the server chose (TCP), or
 * goes on after the server has answered (UDP). */
static __always_inline struct flow *decide_half_open(const struct pkt *p, struct verdict *v, struct flow *f)
{
	if (p->key.proto != IPPROTO_TCP)
		return forward(v, f, f->answered ? COMMIT_PROVE : COMMIT_TOUCH);
	if (p->flags & TCP_RST)
		return forward(v, f, COMMIT_CLOSE);
	if (!(p->flags & TCP_ACK)) /* a SYN again */
		return forward(v, f, COMMIT_TOUCH);
	/* The server may have sent up to a window before it sees this. */
	if (!f->answered || p->ack - f->seq - 1 > 0xffff)
		return say(v, ACTION_DROP, REASON_BAD_ACK);
	return forward(v, f, COMMIT_PROVE);
}

static __always_inline struct flow *decide_known(const struct pkt *p, struct verdict *v, struct flow *f)
{
	if (v->half)
		return decide_half_open(p, v, f);
	if (p->key.proto == IPPROTO_TCP && p->flags & (TCP_FIN | TCP_RST))
		return forward(v, f, COMMIT_CLOSE);
	return forward(v, f, COMMIT_TOUCH);
}

static __always_inline int opens(const struct pkt *p)
{
	return p->key.proto == IPPROTO_UDP || (p->flags & (TCP_SYN | TCP_ACK | TCP_RST)) == TCP_SYN;
}

static __always_inline struct flow *decide_new(const struct pkt *p, struct verdict *v, const struct frontend *fe)
{
	if (!opens(p))
		return refuse(p, v, REASON_NO_FLOW);
	struct backend *b = choose(fe, &p->key, &v->backend);

	if (!b)
		return refuse(p, v, REASON_NO_BACKEND);
	if (!(b->snat.w[0] | b->snat.w[1] | b->snat.w[2] | b->snat.w[3]))
		return say(v, ACTION_DROP, REASON_NO_ROUTE);
	v->t.src = b->snat;
	v->t.dst = b->addr;
	v->t.dport = b->port; /* the source port is commit's: taking one is a write */
	v->counted = 2;
	v->commit = COMMIT_OPEN;
	return say(v, ACTION_FORWARD, REASON_FORWARDED);
}

/* To a VIP, but not to a frontend: never to the stack, which would route it back to where it came from. */
static __always_inline struct flow *decide_vip(const struct pkt *p, struct verdict *v, const struct vip *vip)
{
	if (p->fragment)
		return say(v, ACTION_DROP, REASON_FRAGMENT);
	if (p->key.proto == IPPROTO_TCP || p->key.proto == IPPROTO_UDP)
		return refuse(p, v, REASON_NO_FRONTEND);
	if (p->v6 && p->key.proto == IPPROTO_ICMPV6 && p->icmp >= ND_FIRST && p->icmp <= ND_LAST)
		return say(v, ACTION_PASS, REASON_NEIGHBOUR);
	if ((!p->v6 && p->key.proto == IPPROTO_ICMP && p->icmp == ICMP_ECHO) ||
	    (p->v6 && p->key.proto == IPPROTO_ICMPV6 && p->icmp == ICMP6_ECHO)) {
		if (!vip->up)
			return say(v, ACTION_DROP, REASON_VIP_DOWN);
		return say(v, ACTION_ECHO, REASON_ECHO);
	}
	return say(v, ACTION_DROP, REASON_PROTOCOL);
}

static __always_inline struct flow *decide(const struct pkt *p, enum reason parsed, struct verdict *v)
{
	struct vip *vip;
	struct flow *f;

	if (parsed == REASON_NOT_OURS)
		return say(v, ACTION_PASS, REASON_NOT_OURS);
	if (parsed == REASON_MALFORMED || p->fragment ||
	    (p->key.proto != IPPROTO_TCP && p->key.proto != IPPROTO_UDP)) {
		vip = bpf_map_lookup_elem(&vips, &p->key.t.dst);
		if (!vip)
			return say(v, ACTION_PASS, REASON_NOT_OURS);
		if (parsed == REASON_MALFORMED)
			return say(v, ACTION_DROP, REASON_MALFORMED);
		return decide_vip(p, v, vip);
	}
	if (in_snat_range(p->key.t.dport)) {
		f = find(&p->key, &v->half);
		if (f && f->reply)
			return decide_reply(p, v, f);
		v->half = 0;
	}
	struct frontend_key k = { .vip = p->key.t.dst, .port = p->key.t.dport, .proto = p->key.proto };
	struct frontend *fe = bpf_map_lookup_elem(&frontends, &k);

	if (!fe) {
		vip = bpf_map_lookup_elem(&vips, &p->key.t.dst);
		if (!vip)
			return say(v, ACTION_PASS, REASON_NOT_OURS);
		return decide_vip(p, v, vip);
	}
	v->frontend = fe->id;
	v->counted = 1;
	f = find(&p->key, &v->half);
	/* A flow that is over does not stand in the way of a client that uses its port again. */
	if (f && (f->state < FLOW_CLOSING || p->key.proto != IPPROTO_TCP || !opens(p)) && !expired(f, p->key.proto, bpf_ktime_get_coarse_ns()))
		return decide_known(p, v, f);
	v->half = 0;
	return decide_new(p, v, fe);
}
