/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/* commit, for packets of known NAT flows that neither open nor close them: track both sides' sequence numbers, and when
 * the flow was last used. */
#pragma once
#include "flow.h"
#include "scratch.h"

/* nat_other returns the entry of a flow's other side. */
static __always_inline struct flow *nat_other(const struct pkt *p, const struct verdict *v)
{
	if (v->reply) {
		struct client_flow *c = flow_find_client(&v->client, pkt_is_stream(p));

		if (!c || c->backend != v->backend || c->sport != p->key.t.dport || c->dport != p->key.t.sport)
			return 0;
		return &c->f;
	}
	struct server_flow *s = flow_find_server(&v->server, pkt_is_stream(p));

	return s ? &s->f : 0;
}

/* nat_acknowledges reports whether a packet's sender knows the connection. A SYN-ACK does not show that, because a
 * server answers every SYN, including one with a forged source. */
static __always_inline int nat_acknowledges(const struct pkt *p)
{
	return (p->flags & (TCP_SYN | TCP_ACK)) == TCP_ACK;
}

/* nat_learn_tag stores the tag of the first packet after the confirmation if the server has answered with several
 * tags. */
static __always_inline void nat_learn_tag(const struct pkt *p, struct flow *f)
{
	if (f->doubt != DOUBT_TAG || !nat_acknowledges(p))
		return;
	f->ack = p->ack;
	f->doubt = 0;
}

/* flow_bytes returns the length of a datagram without its header. */
static __always_inline __u32 flow_bytes(const struct pkt *p)
{
	return p->l3 + p->l3len - p->l4 - (p->fragment == FRAG_LATER ? 0 : sizeof(struct udphdr));
}

/* flow_count counts a packet of a known flow. The bytes of TCP follow from the sequence numbers. */
static __always_inline void flow_count(const struct pkt *p, const struct verdict *v, struct flow *f)
{
	if (p->icmp_error)
		return;
	if (v->half_open && !v->reply) {
		flow_figures(f)->client_packets++;
		return;
	}
	if (!++f->packets)
		flow_figures(f)->packets++;
	if (p->key.proto != IPPROTO_UDP)
		return;
	f->end += flow_bytes(p);
	if (f->end < flow_bytes(p))
		flow_figures(f)->wraps++;
}

/* nat_keeps_alive reports whether a packet keeps its side of the flow from expiring. Datagrams do. A SYN, or a packet
 * that acknowledges nothing, does not, because a server that has lost the connection answers a SYN, and an old SCTP
 * cookie with an ERROR. Stray packets do not either once one side has closed the flow. */
static __always_inline int nat_keeps_alive(const struct pkt *p, const struct flow *f, int near)
{
	if (!pkt_is_stream(p))
		return 1;
	if (f->state == FLOW_CLOSED || !nat_acknowledges(p))
		return 0;
	return f->state != FLOW_CLOSING || near || p->key.proto != IPPROTO_TCP;
}

/* nat_follow stores the sending side's sequence numbers. Numbers far from the last ones do not belong to the flow. It
 * writes only what has changed. */
static __always_inline void nat_follow(const struct pkt *p, const struct verdict *v, struct flow *f)
{
	__u32 end = p->seq + p->payload + (p->flags & TCP_FIN);
	int near = p->key.proto == IPPROTO_TCP && nat_is_near(p, f, end);

	if (f->seen != v->now && nat_keeps_alive(p, f, near))
		f->seen = v->now;
	if (f->generation != v->generation)
		f->generation = v->generation;
	if (!near) {
		nat_learn_tag(p, f);
		return;
	}
	if ((__s32)(end - f->end) > 0) {
		if (end < f->end)
			flow_figures(f)->wraps++;
		f->end = end;
	} else if (p->payload) {
		flow_figures(f)->resent++;
	}
	if ((__s32)(p->ack - f->ack) > 0)
		f->ack = p->ack;
	if (f->doubt)
		f->doubt = 0;
}

/* nat_acknowledge records that the client of a closed flow has acknowledged everything that its server sent. */
static __always_inline void nat_acknowledge(const struct pkt *p, const struct verdict *v, struct flow *f,
					    struct flow *other)
{
	struct flow *server = v->reply ? f : other, *client = v->reply ? other : f;

	if (!server || !client || client->ack != server->end)
		return;
	__u8 *fin = &flow_figures(server)->fin;

	if (*fin == FIN_FIRST)
		*fin = FIN_ACKNOWLEDGED;
	else if (*fin == FIN_SECOND && p->key.proto == IPPROTO_TCP)
		*fin = FIN_OVER;
}

/* nat_touch is for packets that neither open nor close a flow. */
static __always_inline void nat_touch(const struct pkt *p, const struct verdict *v, struct flow *f)
{
	int doubted = f->doubt, trusted;
	struct flow *other;

	nat_follow(p, v, f);
	trusted = doubted && !f->doubt;
	if (!trusted && f->state != FLOW_CLOSED)
		return;
	other = nat_other(p, v);
	if (trusted && other && other->doubt == DOUBT_RESET)
		other->doubt = 0; /* the server's side determines the timeout, and may be silent */
	if (f->state == FLOW_CLOSED)
		nat_acknowledge(p, v, f, other);
}
