/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/* decide, for NAT flows, and functions that it shares with DSR. */
#pragma once
#include "scratch.h"
#include "snat.h"

static __always_inline struct flow *verdict_set(struct verdict *v, enum action a, enum reason r)
{
	v->action = a;
	v->reason = r;
	return 0;
}

static __always_inline void verdict_drop(struct verdict *v, enum reason r)
{
	verdict_set(v, ACTION_DROP, r);
	v->commit = COMMIT_NONE;
}

/* verdict_forward sends a packet of a NAT flow to the verdict's destination. */
static __always_inline struct flow *verdict_forward(struct verdict *v, struct flow *f, enum commit c)
{
	v->method = METHOD_NAT;
	v->frontend = v->client.frontend;
	v->counted = 2;
	v->commit = c;
	verdict_set(v, ACTION_FORWARD, REASON_FORWARDED);
	return f;
}

/* verdict_refuse answers as the protocol requires, so that the client fails immediately. */
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

/* verdict_fail drops a packet because of a fault of this node, but answers a TCP SYN, so that the client fails
 * immediately. */
static __always_inline struct flow *verdict_fail(const struct pkt *p, struct verdict *v, enum reason r)
{
	verdict_drop(v, r);
	if (p->key.proto == IPPROTO_TCP && pkt_opens_flow(p) && (r == REASON_SNAT_EXHAUSTED || r == REASON_NO_ROUTE))
		v->action = ACTION_RESET;
	return 0;
}

/* A sequence number within this distance of the last one counts as the flow's. This is more than the windows that
 * senders use, and 1/256 of the numbers that an attacker has to guess from. */
#define FLOW_WINDOW (1 << 23)

static __always_inline int flow_in_window(__u32 seq, __u32 of)
{
	return seq - of + FLOW_WINDOW <= 2 * FLOW_WINDOW;
}

/* nat_is_near reports whether the sequence numbers of a segment that ends with end are close to the last ones. */
static __always_inline int nat_is_near(const struct pkt *p, const struct flow *f, __u32 end)
{
	return p->flags & TCP_ACK && flow_in_window(end, f->end) && flow_in_window(p->ack, f->ack);
}

/* nat_is_later reports whether a packet belongs not to a closed flow but to the next one from the same port. A previous
 * node of a slot does not look up that flow's SYN, whose numbers begin shortly after the last ones. */
static __always_inline int nat_is_later(const struct pkt *p, const struct flow *f)
{
	__u32 end = p->seq + p->payload + (p->flags & TCP_FIN);

	if (pkt_opens_flow(p))
		return 1;
	return p->key.proto == IPPROTO_TCP && p->flags & TCP_ACK && !p->icmp_error && !pkt_without_l4(p) &&
	       ((__s32)(end - f->end) > 0 || !nat_is_near(p, f, end));
}

/* nat_find_reply returns the flow of a server's packet, and writes the resulting packet into the verdict. */
static __always_inline struct flow *nat_find_reply(const struct pkt *p, struct verdict *v)
{
	__u32 *id = bpf_map_lookup_elem(&sy_servers, &p->key.t.src);

	if (!id)
		return 0;
	v->server.to = p->key.t.dst;
	v->server.server = server_id(*id, p->key.proto);
	v->server.dport = p->key.t.dport;
	v->server.sport = p->key.t.sport;
	struct server_flow *s = flow_find_server(&v->server, pkt_is_stream(p));

	v->half_open = !s;
	if (!s && pkt_is_stream(p))
		s = bpf_map_lookup_elem(&sy_halfopen_servers, &v->server);
	if (!s)
		return 0;
	v->client = s->client;
	v->backend = s->backend;
	struct addr *vip = bpf_map_lookup_elem(&sy_frontend_vips, &v->client.frontend);
	struct backend *b = backend_get(v->backend);

	if (!vip || !b)
		return 0;
	v->generation = backend_generation(b);
	if (flow_ended(v->client.frontend, v->backend, s->f.generation, v->generation))
		return 0;
	v->t.src = *vip;
	v->t.dst = v->client.client;
	v->t.sport = v->client.dport;
	v->t.dport = v->client.sport;
	v->reply = 1;
	v->local = b->local;
	return &s->f;
}

/* nat_lowers_pmtu reports whether a packet is an ICMP error that makes its receiver send small packets. A server would
 * send them to all clients, which share one address there, and a client to the VIP. Servers check the quoted TCP
 * sequence number, but a client knows the sequence numbers of its own connection, and UDP has none. */
static __always_inline int nat_lowers_pmtu(const struct pkt *p, const struct verdict *v)
{
	return p->icmp_error && p->mtu && p->mtu < MIN_MTU && !addr_equal(v->t.src.w, p->key.t.src.w);
}

static __always_inline struct flow *decide_reply(const struct pkt *p, struct verdict *v, struct flow *f)
{
	if (nat_lowers_pmtu(p, v))
		return verdict_set(v, ACTION_DROP, REASON_PMTU_TOO_LOW);
	if (pkt_without_l4(p))
		return verdict_forward(v, f, COMMIT_NONE);
	if (!pkt_is_stream(p))
		return verdict_forward(v, f, f->answered ? COMMIT_TOUCH : COMMIT_ANSWER);
	if (p->flags & (TCP_FIN | TCP_RST))
		return verdict_forward(v, f, COMMIT_CLOSE);
	if (v->half_open && (p->flags & (TCP_SYN | TCP_ACK)) == (TCP_SYN | TCP_ACK))
		return verdict_forward(v, f, COMMIT_ANSWER);
	return verdict_forward(v, f, COMMIT_TOUCH);
}

/* flow_confirms reports whether the client has received what the server chose: a sequence number (TCP) or a tag
 * (SCTP). */
static __always_inline int flow_confirms(const struct pkt *p, const struct verdict *v, const struct flow *f)
{
	int tcp = p->key.proto != IPPROTO_SCTP;
	struct server_flow *s;

	if (!f->answered)
		return 0;
	/* Before the server receives this, it may have sent up to a window. */
	if (p->ack - f->end - tcp <= (tcp ? 0xffff : 0))
		return 1;
	if (f->answered != ANSWERED_AGAIN)
		return 0;
	s = bpf_map_lookup_elem(&sy_halfopen_servers, &v->server);
	return s && p->ack == s->client_end + tcp;
}

/* decide_half_open handles the client's packets of a half-open flow. A packet that acknowledges the server's sequence
 * number confirms the flow. */
static __always_inline struct flow *decide_half_open(const struct pkt *p, struct verdict *v, struct flow *f)
{
	if (pkt_without_l4(p))
		return verdict_forward(v, f, COMMIT_NONE);
	if (p->flags & TCP_RST)
		return verdict_forward(v, f, COMMIT_CLOSE);
	if (!(p->flags & TCP_ACK)) /* a repeated SYN */
		return verdict_forward(v, f, COMMIT_TOUCH);
	if (!flow_confirms(p, v, f))
		return verdict_set(v, ACTION_DROP, REASON_BAD_ACK);
	return verdict_forward(v, f, COMMIT_CONFIRM);
}

static __always_inline struct flow *decide_known(const struct pkt *p, struct verdict *v, struct flow *f)
{
	if (v->half_open)
		return decide_half_open(p, v, f);
	if (nat_lowers_pmtu(p, v))
		return verdict_set(v, ACTION_DROP, REASON_PMTU_TOO_LOW);
	if (pkt_without_l4(p))
		return verdict_forward(v, f, COMMIT_NONE);
	if (!pkt_is_stream(p))
		return verdict_forward(v, f, f->answered && f->state == FLOW_HALF_OPEN ? COMMIT_CONFIRM : COMMIT_TOUCH);
	/* A SYN never replaces a live flow; the server challenges it (RFC 5961, 4). */
	if (p->flags & TCP_SYN)
		return verdict_forward(v, f, COMMIT_NONE);
	if (p->flags & (TCP_FIN | TCP_RST))
		return verdict_forward(v, f, COMMIT_CLOSE);
	return verdict_forward(v, f, COMMIT_TOUCH);
}

/* nat_select writes into the verdict what the packets of a flow's client become. It returns 0 if the flow has ended or
 * expired, or has lost its backend. */
static __always_inline int nat_select(const struct pkt *p, struct verdict *v, const struct client_flow *c)
{
	__u32 backend = c->backend;
	struct backend *b = backend_get(backend);

	if (!b || addr_is_zero(&b->addr))
		return 0;
	v->generation = backend_generation(b);
	if (flow_ended(v->client.frontend, backend, c->f.generation, v->generation))
		return 0;
	if (c->f.state == FLOW_CLOSED && nat_is_later(p, &c->f))
		return 0;
	v->server.to = c->source;
	v->server.server = server_id(b->server, p->key.proto);
	v->server.dport = c->sport;
	v->server.sport = c->dport;
	if (flow_side_expired(&c->f, pkt_is_stream(p), v->now)) {
		struct server_flow *s = flow_find_server(&v->server, pkt_is_stream(p));

		if (!s || flow_side_expired(&s->f, pkt_is_stream(p), v->now))
			return 0;
	}
	snat_verdict(v, b, backend);
	return 1;
}

static __always_inline int frontend_by_hash(const struct frontend *fe)
{
	return (fe->algorithm == ALGORITHM_FLOW_HASH || fe->algorithm == ALGORITHM_SOURCE_HASH) && !fe->affinity;
}

/* nat_find_half_open is snat_find_half_open for each backend that a client's packet may have. fe is the frontend whose
 * table lists them. It and nat_choose are global functions, which the verifier checks once. The packet's state is in
 * the scratch memory. */
__noinline int nat_find_half_open(struct frontend *fe)
{
	struct scratch *scratch = scratch_get();

	if (!fe || !scratch)
		return 0;
	const struct pkt *p = &scratch->p;
	struct verdict *v = &scratch->v;

	if (!frontend_by_hash(fe))
		return snat_find_stored(p, v);
	__u32 h = fe->algorithm == ALGORITHM_FLOW_HASH ? v->hash : flow_hash(&p->key, fe->algorithm);
	__u32 index = table_index(&fe->table, h), slot = table_slot(&fe->table, index);
	__u32 older = table_older_hash(fe, &p->key, h);

	/* The slot may have received another backend since the SYN. */
#pragma clang loop unroll(full)
	for (int i = 0; i <= PREVIOUS_MAX; i++) {
		__u32 backend = i ? table_previous(&fe->table, index, i - 1) : slot_backend(slot);

		if (backend == ANY_BACKEND)
			backend = slot_backend(table_slot(&fe->older, table_index(&fe->older, older)));
		if (backend == NO_BACKEND)
			break;
		if (snat_find_half_open(fe, backend))
			return 1;
		if (!(slot & SLOT_CHANGED))
			break;
	}
	return (!pkt_opens_flow(p) || snat_is_later(v->hash)) && snat_find_stored(p, v);
}

/* nat_find returns the flow of a client's packet. frontend is the id in the flow's key, and fe the frontend whose table
 * has the backends, or NULL. */
static __always_inline struct flow *nat_find(const struct pkt *p, struct verdict *v, __u32 frontend,
					     struct frontend *fe)
{
	flow_set_client(&v->client, p, frontend);
	struct client_flow *c = flow_find_client(&v->client, pkt_is_stream(p));

	v->now = flow_clock();
	if (c && nat_select(p, v, c))
		return &c->f;
	v->replaces = c != 0;
	if (!pkt_is_stream(p) || !fe || pkt_without_l4(p) || !nat_find_half_open(fe))
		return 0;
	struct server_flow *s = bpf_map_lookup_elem(&sy_halfopen_servers, &v->server);

	if (!s)
		return 0;
	v->half_open = 1;
	return &s->f;
}

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

static __always_inline int udp_share_is_full(__u32 frontend)
{
	return share_is_full(&sy_udp_share, frontend, udp_flows);
}

/* snat_choose_anew chooses a source that the hash does not determine: first to the same backend, then to others. */
static __always_inline int snat_choose_anew(struct frontend *fe, struct verdict *v)
{
	__u32 backend = v->backend;

	v->by_hash = 0;
#pragma clang loop unroll(disable)
	for (int i = 0; i < SNAT_ROUNDS; i++) {
		if (i >= SNAT_ROUNDS_SAME)
			backend = table_random(&fe->table);
		if (snat_choose(fe, backend, SNAT_TRIES + bpf_get_prandom_u32() % 65536))
			return 1;
	}
	return 0;
}

/* nat_choose chooses the backend and source of a new flow, and so what its packets become. If it cannot, it returns the
 * reason. commit claims the source, because that is a write. */
__noinline int nat_choose(struct frontend *fe)
{
	struct scratch *scratch = scratch_get();

	if (!fe || !scratch)
		return REASON_INTERNAL_ERROR;
	const struct pkt *p = &scratch->p;
	struct verdict *v = &scratch->v;
	if (!frontend_allows(fe, &p->key.t.src))
		return REASON_NOT_ALLOWED;
	struct backend *b = backend_select(p, v, fe);

	if (!b)
		return REASON_NO_BACKEND;
	if (!snat_to(&v->server, p, fe, b))
		return REASON_NO_ROUTE;
	if (!pkt_is_stream(p) && !v->replaces && udp_share_is_full(v->client.frontend) && !flows_unattended(0, v->now))
		return REASON_UDP_SHARE_FULL;
	v->by_hash = frontend_by_hash(fe);
	return snat_choose(fe, v->backend, 0) || snat_choose_anew(fe, v) ? REASON_NONE : REASON_SNAT_EXHAUSTED;
}

/* decide_new is for packets whose flow nat_find has not found. */
static __always_inline struct flow *decide_new(const struct pkt *p, struct verdict *v, struct frontend *fe)
{
	if (!pkt_opens_flow(p))
		return verdict_refuse(p, v, REASON_NO_FLOW);
	int reason = nat_choose(fe);

	if (reason == REASON_NO_BACKEND)
		return fe->drop_when_empty ? verdict_set(v, ACTION_DROP, REASON_NO_LOCAL_BACKEND) :
					     verdict_refuse(p, v, REASON_NO_BACKEND);
	if (reason)
		return verdict_fail(p, v, reason);
	v->method = METHOD_NAT;
	v->counted = 2;
	v->commit = COMMIT_OPEN;
	return verdict_set(v, ACTION_FORWARD, REASON_FORWARDED);
}

static __always_inline struct flow *decide_nat(const struct pkt *p, struct verdict *v, struct frontend *fe)
{
	struct flow *f = nat_find(p, v, fe->id, fe);

	return f ? decide_known(p, v, f) : decide_new(p, v, fe);
}
