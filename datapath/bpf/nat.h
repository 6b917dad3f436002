/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/* decide, for flows by nat, and what it has in common with one-way flows. */
#pragma once
#include "flow.h"
#include "frontend.h"

static __always_inline struct flow *say(struct verdict *v, enum action a, enum reason r)
{
	v->action = a;
	v->reason = r;
	return 0;
}

/* forward sends a packet of a flow by nat to where the flow goes. */
static __always_inline struct flow *forward(struct verdict *v, struct flow *f, enum commit c)
{
	v->t = f->t;
	v->here = f->here;
	v->method = METHOD_NAT;
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

/* is_stream: opened and closed in so many words. */
static __always_inline int is_stream(const struct pkt *p)
{
	return p->key.proto != IPPROTO_UDP;
}

/* is_part: no packet of its own, but a later fragment, or an error about one. */
static __always_inline int is_part(const struct pkt *p)
{
	return p->error || p->fragment == LATER;
}

/* refuse answers in the way of the protocol, so that the client knows at once. */
static __always_inline struct flow *refuse(const struct pkt *p, struct verdict *v, enum reason r)
{
	if (p->error)
		return say(v, ACTION_DROP, r);
	if (p->fragment == LATER)
		return say(v, ACTION_DROP, REASON_FRAGMENT);
	/* A reset is never answered (RFC 9293, 3.5.2), nor is an ABORT (RFC 9260, 8.4). */
	if (is_stream(p) && p->flags & TCP_RST)
		return say(v, ACTION_DROP, r);
	return say(v, p->key.proto == IPPROTO_TCP ? ACTION_RESET : ACTION_REFUSE, r);
}

static __always_inline struct flow *decide_reply(const struct pkt *p, struct verdict *v, struct flow *f)
{
	if (p->error)
		return forward(v, f, COMMIT_NONE);
	if (!is_stream(p))
		return forward(v, f, v->half ? COMMIT_ANSWER : COMMIT_TOUCH);
	if (p->flags & (TCP_FIN | TCP_RST))
		return forward(v, f, COMMIT_CLOSE);
	if (v->half && (p->flags & (TCP_SYN | TCP_ACK)) == (TCP_SYN | TCP_ACK))
		return forward(v, f, COMMIT_ANSWER);
	return forward(v, f, COMMIT_TOUCH);
}

/* proves reports whether the client has seen what the server chose: a number (TCP), or a tag (SCTP). */
static __always_inline int proves(const struct pkt *p, const struct flow *f)
{
	if (!f->answered)
		return 0;
	if (p->key.proto == IPPROTO_SCTP)
		return p->ack == f->seq;
	/* The server may have sent up to a window before it sees this. */
	return p->ack - f->seq - 1 <= 0xffff;
}

/* A client of a half-open flow: it has proved itself when it acknowledges what the server chose, or, with UDP, goes on
 * after the server has answered. */
static __always_inline struct flow *decide_half_open(const struct pkt *p, struct verdict *v, struct flow *f)
{
	if (is_part(p))
		return forward(v, f, COMMIT_NONE);
	if (!is_stream(p))
		return forward(v, f, f->answered ? COMMIT_PROVE : COMMIT_TOUCH);
	if (p->flags & TCP_RST)
		return forward(v, f, COMMIT_CLOSE);
	if (!(p->flags & TCP_ACK)) /* a SYN again */
		return forward(v, f, COMMIT_TOUCH);
	if (!proves(p, f))
		return say(v, ACTION_DROP, REASON_BAD_ACK);
	return forward(v, f, COMMIT_PROVE);
}

static __always_inline struct flow *decide_known(const struct pkt *p, struct verdict *v, struct flow *f)
{
	if (v->half)
		return decide_half_open(p, v, f);
	if (p->error)
		return forward(v, f, COMMIT_NONE);
	if (is_stream(p) && p->flags & (TCP_FIN | TCP_RST))
		return forward(v, f, COMMIT_CLOSE);
	return forward(v, f, COMMIT_TOUCH);
}

static __always_inline int opens(const struct pkt *p)
{
	return !is_part(p) && (!is_stream(p) || (p->flags & (TCP_SYN | TCP_ACK | TCP_RST)) == TCP_SYN);
}

/* in_force reports whether an entry still says where packets go. A flow that is over does not stand in the way of a
 * client that uses its port again. */
static __always_inline int in_force(const struct pkt *p, const struct flow *f, __u8 method)
{
	if (f->method != method || (f->state >= FLOW_CLOSING && is_stream(p) && opens(p)))
		return 0;
	return !expired(f, p->key.proto, bpf_ktime_get_coarse_ns());
}

/* pick returns the backend for a new flow, and writes down which. */
static __always_inline struct backend *pick(const struct pkt *p, struct verdict *v, const struct frontend *fe)
{
	v->backend = NO_BACKEND;
	if (fe->affinity) {
		v->sticky = 1;
		v->backend = remembered(fe, &p->key.t.src, bpf_ktime_get_coarse_ns());
	}
	if (v->backend == NO_BACKEND) {
		struct slot *s = choose(fe, &p->key);

		if (!s)
			return 0;
		v->backend = s->backend;
	}
	return bpf_map_lookup_elem(&backends, &v->backend);
}

static __always_inline int is_zero(const struct addr *a)
{
	return !(a->w[0] | a->w[1] | a->w[2] | a->w[3]);
}

static __always_inline struct flow *decide_new(const struct pkt *p, struct verdict *v, const struct frontend *fe)
{
	if (!opens(p))
		return refuse(p, v, REASON_NO_FLOW);
	if (!allowed_from(fe, &p->key.t.src))
		return say(v, ACTION_DROP, REASON_NOT_ALLOWED);
	struct backend *b = pick(p, v, fe);

	if (!b)
		return fe->silent ? say(v, ACTION_DROP, REASON_NONE_HERE) : refuse(p, v, REASON_NO_BACKEND);
	if (!b->here && is_zero(&b->snat[0]))
		return say(v, ACTION_DROP, REASON_NO_ROUTE);
	v->method = METHOD_NAT;
	v->here = b->here;
	v->t.src = b->here ? p->key.t.src : b->snat[0];
	v->t.sport = p->key.t.sport;
	v->t.dst = b->addr;
	/* Another source port is commit's: taking one is a write. */
	v->t.dport = bpf_htons(bpf_ntohs(b->port) + bpf_ntohs(p->key.t.dport) - bpf_ntohs(fe->first));
	v->counted = 2;
	v->commit = COMMIT_OPEN;
	return say(v, ACTION_FORWARD, REASON_FORWARDED);
}

static __always_inline struct flow *decide_nat(const struct pkt *p, struct verdict *v, const struct frontend *fe)
{
	struct flow *f = find(&p->key, &v->half);

	if (f && in_force(p, f, METHOD_NAT))
		return decide_known(p, v, f);
	v->half = 0;
	return decide_new(p, v, fe);
}
