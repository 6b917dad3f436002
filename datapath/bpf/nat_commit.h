/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/* commit, for NAT flows: claim a source port, track both sides' sequence numbers, move and close flows. */
#pragma once
#include "nat_follow.h"
#include "reclaim.h"

#define E2BIG 7

static __always_inline long flow_update_client(const struct client_key *k, const struct client_flow *c, int stream)
{
	return stream ? bpf_map_update_elem(&sy_stream_clients, k, c, BPF_ANY) :
			bpf_map_update_elem(&sy_udp_clients, k, c, BPF_ANY);
}

static __always_inline long flow_update_server(const struct server_key *k, const struct server_flow *s, int stream)
{
	return stream ? bpf_map_update_elem(&sy_stream_servers, k, s, BPF_NOEXIST) :
			bpf_map_update_elem(&sy_udp_servers, k, s, BPF_NOEXIST);
}

/* nat_replace removes the client's entry of an ended flow with the key in v. The flow's port stays unused for a while,
 * unless the flow ended because its backend went down. */
static __always_inline void nat_replace(const struct verdict *v, int stream)
{
	struct client_flow *c = flow_find_client(&v->client, stream);
	struct backend *b = c ? backend_get(c->backend) : 0;

	if (b && flow_ended(v->client.frontend, c->backend, c->f.generation, backend_generation(b))) {
		struct server_key k = { .to = c->source,
					.server = b->server << 8 | (v->server.server & 0xff),
					.dport = c->sport,
					.sport = c->dport };
		struct server_flow *s = flow_find_server(&k, stream);

		if (s && client_key_equal(&s->client, &v->client)) {
			flow_remove(&k, stream);
			return;
		}
	}
	flow_delete_client(&v->client, stream);
}

/* nat_insert writes both entries of a flow, or neither if one cannot be written. */
static __always_inline long nat_insert(const struct verdict *v, const struct client_flow *c,
				       const struct server_flow *s, int stream)
{
	long err = flow_update_server(&v->server, s, stream);

	if (err)
		return err;
	err = flow_update_client(&v->client, c, stream);
	if (err)
		flow_delete_server(&v->server, stream);
	return err;
}

/* nat_store writes both entries of a flow from the scratch memory into the tables of its protocol. */
static __always_inline int nat_store(struct scratch *scratch)
{
	struct verdict *v = &scratch->v;
	struct client_flow *c = &scratch->client;
	const struct server_flow *s = &scratch->server;
	int stream = pkt_is_stream(&scratch->p);
	long err = -E2BIG;

	c->source = v->t.src;
	c->backend = v->backend;
	c->sport = v->t.sport;
	c->dport = v->t.dport;
	if (place_prepare(stream, v->now)) {
		err = nat_insert(v, c, s, stream);
		if (err == -E2BIG && flows_unattended(stream, v->now)) {
			place_search(stream, v->now);
			err = nat_insert(v, c, s, stream);
		}
	}
	if (err)
		verdict_drop(v, err == -E2BIG ? REASON_FLOWS_FULL : REASON_NO_FLOW);
	return !err;
}

/* nat_open_datagram writes a new UDP flow. If its frontend has used its share of flows, no agent is running
 * (nat_choose). */
static __always_inline void nat_open_datagram(struct scratch *scratch)
{
	struct verdict *v = &scratch->v;

	if (!v->replaces && udp_share_is_full(v->client.frontend)) {
		place_search(0, v->now);
		if (udp_share_is_full(v->client.frontend)) {
			verdict_drop(v, REASON_UDP_SHARE_FULL);
			return;
		}
	}
	if (nat_store(scratch))
		share_add(&sy_udp_share, v->client.frontend, 1);
}

/* nat_write_open claims the source that decide chose, and writes the new flow. For UDP it writes both entries.
 * Otherwise it writes the server's half-open entry, and the client's if the hash cannot find it. If another packet
 * claimed the source at the same moment, this one is dropped, and the client sends again. */
static __always_inline void nat_write_open(struct scratch *scratch, __u64 now)
{
	const struct pkt *p = &scratch->p;
	struct verdict *v = &scratch->v;
	struct client_flow *c = &scratch->client;
	struct server_flow *s = &scratch->server;
	struct flow f = { .seen = v->now, .state = FLOW_HALF_OPEN, .generation = v->generation };
	struct flow_figures figures = { .opened = age_clock(now) };
	int stream = pkt_is_stream(p);

	*c = (struct client_flow){
		.f = f, .source = v->t.src, .backend = v->backend, .sport = v->t.sport, .dport = v->t.dport,
		.figures = figures
	};
	*s = (struct server_flow){
		.f = f, .client = v->client, .backend = v->backend, .client_end = p->seq + p->payload + 1,
		.figures = figures
	};

	if (v->claim == CLAIM_RESTED || v->claim == CLAIM_TIME_WAIT)
		flow_remove(&v->server, stream);
	if (v->replaces)
		nat_replace(v, stream);
	if (!stream) {
		c->f.packets = 1;
		c->f.end = flow_bytes(p);
		nat_open_datagram(scratch);
		return;
	}
	s->figures.client_packets = 1;
	s->figures.handshake = handshake_clock();
	snat_set_use(v, SNAT_HALF_OPEN);
	if (v->later)
		snat_set_later(v->hash);
	if (bpf_map_update_elem(&sy_halfopen_servers, &v->server, s, v->claim >= CLAIM_OVER ? BPF_ANY : BPF_NOEXIST) ||
	    (!v->by_hash && bpf_map_update_elem(&sy_halfopen_clients, &v->client, c, BPF_ANY)))
		verdict_drop(v, REASON_SNAT_EXHAUSTED);
}

/* nat_confirm moves a half-open flow to the table of established flows. f is the server's entry. If the table is full,
 * the client is refused, and the half-open flow remains. When the server repeats its SYN-ACK, the client's reset
 * reaches the server. */
static __always_inline void nat_confirm(struct scratch *scratch, const struct flow *f)
{
	const struct pkt *p = &scratch->p;
	struct verdict *v = &scratch->v;
	__u8 state = p->flags & TCP_FIN ? FLOW_CLOSING : FLOW_ESTABLISHED;
	int sctp = p->key.proto == IPPROTO_SCTP;
	const struct flow_figures *half = flow_figures((struct flow *)f);
	__u32 end = p->seq + p->payload + (p->flags & TCP_FIN);

	scratch->client = (struct client_flow){ .f = { .end = end,
						       .ack = p->ack,
						       .seen = v->now,
						       .state = state,
						       .packets = half->client_packets,
						       .answered = 1,
						       .generation = v->generation },
						.figures = { .opened = half->opened,
							     .first = p->seq,
							     .wraps = end < p->seq,
							     .resent = half->client_packets - 2,
							     .fin = p->flags & TCP_FIN ? FIN_FIRST : 0 } };
	scratch->server = (struct server_flow){ .f = { .end = p->ack,
						       .ack = sctp ? f->ack : p->seq,
						       .seen = v->now,
						       .state = state,
						       .packets = f->packets,
						       /* the last answer may have another tag */
						       .doubt = sctp && p->ack != f->end ? DOUBT_TAG : 0,
						       .answered = 1,
						       .generation = v->generation },
						.client = v->client,
						.backend = v->backend,
						.figures = { .opened = half->opened,
							     .first = p->ack,
							     .handshake = half->handshake,
							     .resent = f->packets - 1 } };
	if (!nat_store(scratch)) {
		if (v->reason == REASON_FLOWS_FULL)
			verdict_refuse(p, v, REASON_FLOWS_FULL);
		return;
	}
	flow_continued(v);
	snat_set_use(v, SNAT_ESTABLISHED);
	bpf_map_delete_elem(&sy_halfopen_servers, &v->server);
	bpf_map_delete_elem(&sy_halfopen_clients, &v->client);
}

/* nat_set_state sets the state of a flow, and starts its timeout for both sides. */
static __always_inline void nat_set_state(const struct verdict *v, struct flow *f, struct flow *other, __u8 state)
{
	if (f->state != state) {
		if (state == FLOW_CLOSED)
			backend_load_add(v->backend, -1);
		f->state = state;
		f->seen = v->now;
	}
	if (other && other->state != state) {
		other->state = state;
		other->seen = v->now;
	}
}

#define RST_CHALLENGED 0xffff /* within this distance, its window, the receiver challenges a RST */
#define RST_IN_FLIGHT (1 << 20) /* farther away, the sender's last number may come from a forged segment */

/* nat_reset records a RST. The RST ends the flow if it has a number that the receiver must accept immediately (RFC
 * 5961, 3.2): the number that the receiver acknowledged, or the one after the sender's last byte. The receiver
 * challenges a RST with another number in the window, so this only shortens the flow's timeout until one side sends
 * again. The receiver ignores a number outside the window. */
static __always_inline void nat_reset(const struct pkt *p, const struct verdict *v, struct flow *f, struct flow *other)
{
	if (f->doubt == DOUBT_TAG)
		return;
	int sctp = p->key.proto == IPPROTO_SCTP; /* the tag replaces the sequence number (RFC 9260, 8.5.1) */
	int last = p->seq == f->end;
	__u32 ahead = p->seq - (other ? other->ack : f->end);

	if (sctp ? p->ack == f->ack : !ahead || (last && ahead <= RST_IN_FLIGHT)) {
		nat_set_state(v, f, other, FLOW_CLOSED);
		return;
	}
	if (sctp || (!last && ahead > RST_CHALLENGED))
		return;
	f->doubt = DOUBT_RESET;
	if (other)
		other->doubt = DOUBT_RESET;
}

/* nat_fin records a FIN whose numbers are in the windows. */
static __always_inline void nat_fin(const struct pkt *p, const struct verdict *v, struct flow *f, struct flow *other)
{
	if (p->key.proto == IPPROTO_SCTP ? p->ack != f->ack : !nat_is_near(p, f, p->seq + p->payload + 1))
		return;
	struct flow_figures *figures = flow_figures(f);
	__u8 others = other ? flow_figures(other)->fin : 0;

	if (!figures->fin)
		figures->fin = others ? FIN_SECOND : FIN_FIRST;
	if (f->state == FLOW_CLOSED) /* because of a RST */
		return;
	nat_set_state(v, f, other, other && !others ? FLOW_CLOSING : FLOW_CLOSED);
}

/* nat_ends_half_open reports whether the server must accept a RST or ABORT from the client of a half-open flow. */
static __always_inline int nat_ends_half_open(const struct pkt *p, const struct server_flow *s)
{
	if (!s->f.answered) /* clients send none then, and the server knows none of the numbers */
		return 0;
	return p->key.proto == IPPROTO_SCTP ? p->ack == s->f.end : p->seq == s->f.ack;
}

/* nat_refuses reports whether the client of a half-open flow must accept a RST or ABORT from the server. Any other may
 * come from somebody who sends to all ports. */
static __always_inline int nat_refuses(const struct pkt *p, const struct server_flow *s)
{
	if (p->key.proto == IPPROTO_SCTP)
		return p->ack == (s->f.answered ? s->f.ack : s->client_end - 1);
	if (s->f.answered)
		return p->seq == s->f.end + 1 || (s->f.answered == ANSWERED_AGAIN && p->seq == s->client_end + 1);
	return p->flags & TCP_ACK && p->ack == s->client_end;
}

/* nat_answered measures the handshake of a server that answers for the first time. If two CPUs have such an answer at
 * the same moment, one of them measures. */
static __always_inline void nat_answered(const struct verdict *v, struct flow_figures *figures)
{
	if (__sync_lock_test_and_set(&figures->first, 1))
		return;
	__u32 took = handshake_clock() - figures->handshake;

	figures->handshake = took;
	handshake_count(v->backend, took);
}

/* nat_write_half_open is for packets of half-open flows that do not confirm them. f is the server's entry. */
static __always_inline void nat_write_half_open(const struct pkt *p, const struct verdict *v, struct flow *f)
{
	struct server_flow *s;

	f->seen = v->now;
	if (v->commit == COMMIT_ANSWER) {
		if (f->state != FLOW_HALF_OPEN) /* the client may already have another half-open flow */
			return;
		if (!f->answered) {
			f->answered = 1;
			f->end = p->seq;
			f->ack = p->ack;
			nat_answered(v, flow_figures(f));
		}
		if (f->end == p->seq)
			return;
	}
	s = bpf_map_lookup_elem(&sy_halfopen_servers, &v->server);
	if (!s)
		return;
	if (v->commit == COMMIT_ANSWER) {
		f->answered = ANSWERED_AGAIN;
		s->client_end = p->seq;
		return;
	}
	if (v->reply) {
		if (p->flags & TCP_RST && nat_refuses(p, s))
			nat_set_state(v, f, 0, FLOW_CLOSED);
		return;
	}
	if (v->commit == COMMIT_CLOSE && nat_ends_half_open(p, s))
		nat_set_state(v, f, 0, FLOW_CLOSED);
	else if (pkt_opens_flow(p) && f->answered != ANSWERED_AGAIN)
		s->client_end = p->seq + p->payload + 1;
}

/* nat_write writes what the verdict on a packet of a known flow requires. f is the entry of the packet's direction, or
 * the server's for a half-open flow. */
static __always_inline void nat_write(struct scratch *scratch, struct flow *f)
{
	const struct pkt *p = &scratch->p;
	struct verdict *v = &scratch->v;
	struct flow *other;

	v->now = flow_clock();
	if (v->half_open && v->commit == COMMIT_CONFIRM) {
		nat_confirm(scratch, f);
		return;
	}
	if (v->half_open) {
		nat_write_half_open(p, v, f);
		return;
	}
	if (v->commit == COMMIT_TOUCH) {
		nat_touch(p, v, f);
		return;
	}
	other = nat_other(p, v);
	switch (v->commit) {
	case COMMIT_ANSWER: /* UDP */
		flow_continued(v);
		f->answered = 1;
		f->seen = v->now;
		if (other)
			other->answered = 1;
		return;
	case COMMIT_CONFIRM: /* UDP */
		f->seen = v->now;
		nat_set_state(v, f, other, FLOW_ESTABLISHED);
		return;
	default:
		break;
	}
	if (p->flags & TCP_RST) {
		nat_reset(p, v, f, other);
	} else {
		nat_learn_tag(p, f);
		nat_fin(p, v, f, other);
		nat_follow(p, v, f);
	}
	if (f->state == FLOW_CLOSED) {
		snat_set_use(v, SNAT_UNKNOWN);
		nat_acknowledge(p, v, f, other);
	}
	if (!(p->flags & TCP_RST) && !v->reply && p->tsval) {
		struct server_flow *s = flow_find_server(&v->server, 1);

		if (s)
			s->client_end = p->tsval;
	}
}
