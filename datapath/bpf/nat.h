/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/* decide, for NAT flows, and what it shares with DSR. */
#pragma once
#include "flow.h"
#include "frontend.h"

static __always_inline struct flow *verdict_set(struct verdict *v, enum action a, enum reason r)
{
	v->action = a;
	v->reason = r;
	return 0;
}

/* verdict_drop makes the verdict a drop with nothing to commit. */
static __always_inline void verdict_drop(struct verdict *v, enum reason r)
{
	v->action = ACTION_DROP;
	v->reason = r;
	v->commit = COMMIT_NONE;
}

/* verdict_forward sends a packet of a NAT flow to the destination of the flow. */
static __always_inline struct flow *verdict_forward(struct verdict *v, struct flow *f, enum commit c)
{
	v->t = f->t;
	v->local = f->local;
	v->method = METHOD_NAT;
	v->frontend = f->frontend;
	v->backend = f->backend;
	v->counted = 2;
	v->commit = c;
	verdict_set(v, ACTION_FORWARD, REASON_FORWARDED);
	return f;
}

static __always_inline int snat_in_range(__be16 port)
{
	__u16 p = bpf_ntohs(port);

	return p >= snat_first && p <= snat_last;
}

/* pkt_is_stream: the protocol marks the begin and the end of a flow. */
static __always_inline int pkt_is_stream(const struct pkt *p)
{
	return p->key.proto != IPPROTO_UDP;
}

/* pkt_without_l4: the packet has no transport header of its own. It is a later fragment or an ICMP error. */
static __always_inline int pkt_without_l4(const struct pkt *p)
{
	return p->icmp_error || p->fragment == FRAG_LATER;
}

/* verdict_refuse answers in the way of the protocol, so that the client fails at once. */
static __always_inline struct flow *verdict_refuse(const struct pkt *p, struct verdict *v, enum reason r)
{
	if (p->icmp_error)
		return verdict_set(v, ACTION_DROP, r);
	if (p->fragment == FRAG_LATER)
		return verdict_set(v, ACTION_DROP, REASON_FRAGMENT_NOT_FOUND);
	/* A reset is never answered (RFC 9293, 3.5.2), nor is an ABORT (RFC 9260, 8.4). */
	if (pkt_is_stream(p) && p->flags & TCP_RST)
		return verdict_set(v, ACTION_DROP, r);
	return verdict_set(v, p->key.proto == IPPROTO_TCP ? ACTION_RESET : ACTION_REFUSE, r);
}

static __always_inline struct flow *decide_reply(const struct pkt *p, struct verdict *v, struct flow *f)
{
	if (p->icmp_error)
		return verdict_forward(v, f, COMMIT_NONE);
	if (!pkt_is_stream(p))
		return verdict_forward(v, f, v->half_open ? COMMIT_ANSWER : COMMIT_TOUCH);
	if (p->flags & (TCP_FIN | TCP_RST))
		return verdict_forward(v, f, COMMIT_CLOSE);
	if (v->half_open && (p->flags & (TCP_SYN | TCP_ACK)) == (TCP_SYN | TCP_ACK))
		return verdict_forward(v, f, COMMIT_ANSWER);
	return verdict_forward(v, f, COMMIT_TOUCH);
}

/* flow_confirms reports whether the client received what the server chose: a sequence number (TCP) or a tag
 * (SCTP). */
static __always_inline int flow_confirms(const struct pkt *p, const struct flow *f)
{
	if (!f->answered)
		return 0;
	if (p->key.proto == IPPROTO_SCTP)
		return p->ack == f->seq;
	/* Until it receives this, the server may have sent up to a window. */
	return p->ack - f->seq - 1 <= 0xffff;
}

/* A client packet of a half-open flow. It confirms the flow when it acknowledges the server's number, or, with
 * UDP, when it follows an answer of the server. */
static __always_inline struct flow *decide_half_open(const struct pkt *p, struct verdict *v, struct flow *f)
{
	if (pkt_without_l4(p))
		return verdict_forward(v, f, COMMIT_NONE);
	if (!pkt_is_stream(p))
		return verdict_forward(v, f, f->answered ? COMMIT_CONFIRM : COMMIT_TOUCH);
	if (p->flags & TCP_RST)
		return verdict_forward(v, f, COMMIT_CLOSE);
	if (!(p->flags & TCP_ACK)) /* a repeated SYN */
		return verdict_forward(v, f, COMMIT_TOUCH);
	if (!flow_confirms(p, f))
		return verdict_set(v, ACTION_DROP, REASON_BAD_ACK);
	return verdict_forward(v, f, COMMIT_CONFIRM);
}

static __always_inline struct flow *decide_known(const struct pkt *p, struct verdict *v, struct flow *f)
{
	if (v->half_open)
		return decide_half_open(p, v, f);
	if (p->icmp_error)
		return verdict_forward(v, f, COMMIT_NONE);
	if (pkt_is_stream(p) && p->flags & (TCP_FIN | TCP_RST))
		return verdict_forward(v, f, COMMIT_CLOSE);
	return verdict_forward(v, f, COMMIT_TOUCH);
}

static __always_inline int pkt_opens_flow(const struct pkt *p)
{
	return !pkt_without_l4(p) && (!pkt_is_stream(p) || (p->flags & (TCP_SYN | TCP_ACK | TCP_RST)) == TCP_SYN);
}

/* flow_valid reports whether an entry still determines the destination. A closed flow does not prevent a new one
 * from the same port. */
static __always_inline int flow_valid(const struct pkt *p, const struct flow *f)
{
	if (f->state >= FLOW_CLOSING && pkt_is_stream(p) && pkt_opens_flow(p))
		return 0;
	return !flow_expired(f, p->key.proto, bpf_ktime_get_coarse_ns());
}

/* backend_select returns the backend for a new flow and records its id in the verdict. */
static __always_inline struct backend *backend_select(const struct pkt *p, struct verdict *v, const struct frontend *fe)
{
	v->backend = NO_BACKEND;
	if (fe->affinity) {
		v->affinity = 1;
		v->backend = affinity_lookup(fe, &p->key.t.src, bpf_ktime_get_coarse_ns());
	}
	if (v->backend == NO_BACKEND)
		v->backend = table_select(fe, &p->key, v->hash);
	return v->backend == NO_BACKEND ? 0 : backend_get(v->backend);
}

static __always_inline int addr_is_zero(const struct addr *a)
{
	return !(a->w[0] | a->w[1] | a->w[2] | a->w[3]);
}

static __always_inline struct flow *decide_new(const struct pkt *p, struct verdict *v, const struct frontend *fe)
{
	if (!pkt_opens_flow(p))
		return verdict_refuse(p, v, REASON_NO_FLOW);
	if (!frontend_allows(fe, &p->key.t.src))
		return verdict_set(v, ACTION_DROP, REASON_NOT_ALLOWED);
	struct backend *b = backend_select(p, v, fe);

	if (!b)
		return fe->drop_when_empty ? verdict_set(v, ACTION_DROP, REASON_NO_LOCAL_BACKEND) :
					     verdict_refuse(p, v, REASON_NO_BACKEND);
	if (!b->local && addr_is_zero(&b->snat[0]))
		return verdict_set(v, ACTION_DROP, REASON_NO_ROUTE);
	v->method = METHOD_NAT;
	v->local = b->local;
	v->t.src = b->local ? p->key.t.src : b->snat[0];
	v->t.sport = p->key.t.sport;
	v->t.dst = b->addr;
	/* commit chooses the source port: claiming one is a write. */
	v->t.dport = bpf_htons(bpf_ntohs(b->port) + bpf_ntohs(p->key.t.dport) - bpf_ntohs(fe->first_port));
	v->counted = 2;
	v->commit = COMMIT_OPEN;
	return verdict_set(v, ACTION_FORWARD, REASON_FORWARDED);
}

static __always_inline struct flow *decide_nat(const struct pkt *p, struct verdict *v, const struct frontend *fe)
{
	struct flow *f = flow_find(&p->key, &v->half_open);

	if (f && flow_valid(p, f))
		return decide_known(p, v, f);
	v->half_open = 0;
	return decide_new(p, v, fe);
}
