/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/* Source addresses and ports of NAT flows. The flow hash determines the choices, so a client's packet finds the
 * half-open entry that its SYN wrote under the server's key. For a backend on this node, and for a frontend that keeps
 * the source, the source is the client's. Then the port changes only if the client already has another flow from it to
 * the backend through another VIP. */
#pragma once
#include "flow.h"
#include "frontend.h"
#include "scratch.h"

/* Loops over the tries are unrolled, because Linux 6.1 rejects a loop whose last instruction is not a jump. If no try
 * gives a source, more rounds of SNAT_TRIES begin at random ports. With 95 % of the ports in use, one SYN in 25,000
 * finds no source to the backend. */
#define SNAT_TRIES 6
#define SNAT_ROUNDS_SAME 32 /* to the same backend; the rest are to any backend of the table */
#define SNAT_ROUNDS (SNAT_ROUNDS_SAME + 16)

/* One bit per source port that a flow may have, including the ports of previous values of snat_ports. */
ARRAY(__u64, 65536 / 64) sy_snat_ports SEC(".maps");

/* snat_is_used reports whether a flow may have a source port. */
static __always_inline int snat_is_used(__be16 port)
{
	__u32 n = bpf_ntohs(port), i = n / 64;
	__u64 *word = bpf_map_lookup_elem(&sy_snat_ports, &i);

	return word && *word >> n % 64 & 1;
}

/* snat_port returns the n-th port of all ranges, modulo their size. */
static __always_inline __be16 snat_port(__u32 n)
{
	n %= snat_ports ?: 1;
	for (int i = 0; i < SNAT_RANGES; i++) {
		__u32 size = snat_last[i] - snat_first[i] + 1;

		if (n < size)
			return bpf_htons(snat_first[i] + n);
		n -= size;
	}
	return 0;
}

/* snat_candidate sets the i-th choice of a source for a flow to a backend. */
static __always_inline void snat_candidate(struct server_key *k, const struct pkt *p, const struct verdict *v,
					   const struct frontend *fe, const struct backend *b, __u32 i)
{
	int keep = b->local || fe->keep_source;
	__u32 start = hash_finish(v->hash);
	const struct addr *ours = &b->snat[((start >> 28) + i) & (SNAT_ADDRS - 1)];

	/* 65537 is coprime to every possible number of ports, so the choices differ. */
	k->dport = keep && !i ? p->key.t.sport : snat_port(start + i * 65537);
	if (keep)
		k->to = p->key.t.src;
	else
		k->to = addr_is_zero(ours) ? b->snat[0] : *ours;
}

/* snat_to sets the server's part of a key. It returns 0 if the backend cannot be reached. */
static __always_inline int snat_to(struct server_key *k, const struct pkt *p, const struct frontend *fe,
				   const struct backend *b)
{
	k->server = server_id(b->server, p->key.proto);
	k->sport = backend_port(b, fe, p->key.t.dport);
	return b->local || !addr_is_zero(&b->snat[0]);
}

/* snat_verdict translates the addresses and ports of a client's packets to match v->server, the key of the answers. */
static __always_inline void snat_verdict(struct verdict *v, const struct backend *b, __u32 backend)
{
	v->t.src = v->server.to;
	v->t.dst = b->addr;
	v->t.sport = v->server.dport;
	v->t.dport = v->server.sport;
	v->local = b->local;
	v->backend = backend;
}

/* With hints, a SYN needs fewer lookups of half-open and established flows; each costs more than all other work. Hints
 * are in arrays, indexed by the low bits of a hash, and written without a lock, because a lost one costs only lookups.
 * From the highest bit down, a hint in sy_snat_used has 14 bits of snat_use_hash, the use and the time. */
enum snat_use {
	SNAT_UNKNOWN,
	SNAT_HALF_OPEN, /* claimed by a half-open flow at that time */
	SNAT_ESTABLISHED, /* of an established flow at that time */
};

/* In units of flow_clock: 1 s, during which a flow may be removed without a new hint. */
#define SNAT_ESTABLISHED_AGE 250

/* snat_half_open_age is how long a hint about a half-open flow counts, in units of flow_clock. That is as long as the
 * flow lives, but no longer than the hint's 16 bits of time allow. Without a hint, a repeated SYN opens the flow
 * again. */
static __always_inline __u32 snat_half_open_age(void)
{
	__u64 age = timeout_half_open >> FLOW_CLOCK_SHIFT;

	return age < 0xffff ? age : 0xffff;
}

static __always_inline __u32 *snat_hint(void *map, __u32 hash)
{
	__u32 i = hash % SNAT_HINTS;

	return bpf_map_lookup_elem(map, &i);
}

/* snat_use_hash covers a source and its backend's generation, so hints about ended flows become invalid. */
static __always_inline __u32 snat_use_hash(const struct verdict *v)
{
	const struct server_key *k = &v->server;
	__u64 h = hash_pair(k->to.w[3], k->server, 0) + hash_pair((__u32)k->dport << 16 | k->sport, k->to.w[0], 2);

	return hash_finish(h + hash_pair(k->to.w[1] ^ v->generation, k->to.w[2], 4));
}

static __always_inline void snat_set_use(const struct verdict *v, enum snat_use use)
{
	__u32 h = snat_use_hash(v), *hint = snat_hint(&sy_snat_used, h);

	if (hint)
		*hint = (h & 0xfffc0000) | use << 16 | (v->now & 0xffff);
}

/* snat_use returns what the source in v->server is used for, and how long ago that was recorded. */
static __always_inline enum snat_use snat_use(const struct verdict *v, __u32 *age)
{
	__u32 h = snat_use_hash(v), *p = snat_hint(&sy_snat_used, h), hint = p ? *p : ~h;
	enum snat_use use = hint >> 16 & 3;

	*age = (__u16)(v->now - hint);
	if (hint >> 18 != h >> 18 || *age > (use == SNAT_HALF_OPEN ? snat_half_open_age() : SNAT_ESTABLISHED_AGE))
		return SNAT_UNKNOWN;
	return use;
}

/* snat_is_later reports whether the half-open flow with this hash may have a source other than its first choice. */
static __always_inline int snat_is_later(__u32 hash)
{
	__u32 *hint = snat_hint(&sy_snat_later, hash);

	return hint && *hint == hash;
}

static __always_inline void snat_set_later(__u32 hash)
{
	__u32 *hint = snat_hint(&sy_snat_later, hash);

	if (hint && *hint != hash)
		*hint = hash;
}

/* snat_is_half_open reports whether v->server is the key of the client's half-open flow and the flow has not expired.
 * If so, it sets what the packet becomes. */
static __always_inline int snat_is_half_open(struct verdict *v, const struct backend *b, __u32 backend)
{
	struct server_flow *s = bpf_map_lookup_elem(&sy_halfopen_servers, &v->server);

	/* An ended flow may be found before the one that the client has opened since. */
	if (!s || !client_key_equal(&s->client, &v->client) || s->f.state == FLOW_CLOSED ||
	    flow_ended(v->client.frontend, backend, s->f.generation, v->generation) ||
	    flow_side_expired(&s->f, 1, v->now))
		return 0;
	snat_verdict(v, b, backend);
	return 1;
}

/* snat_find_stored finds a client's half-open flow whose source the hash does not determine. */
static __always_inline int snat_find_stored(const struct pkt *p, struct verdict *v)
{
	struct client_flow *c = bpf_map_lookup_elem(&sy_halfopen_clients, &v->client);
	struct backend *b = c ? backend_get(c->backend) : 0;

	if (!b)
		return 0;
	v->generation = backend_generation(b);
	v->server.to = c->source;
	v->server.server = server_id(b->server, p->key.proto);
	v->server.dport = c->sport;
	v->server.sport = c->dport;
	return snat_is_half_open(v, b, c->backend);
}

/* snat_find_half_open finds a client's half-open flow to a backend, and sets what the packet becomes. It must find the
 * flow of a repeated SYN as well. Otherwise the SYN may take another choice that is free by now, and the server would
 * see a second connection. Most SYNs are the first of their flow, and hints save them the lookups. It is a global
 * function, so its stack is in use only while it runs. */
__noinline int snat_find_half_open(struct frontend *fe, __u32 backend)
{
	struct scratch *scratch = scratch_get();
	struct backend *b = backend_get(backend);
	__u32 age;

	if (!fe || !scratch || !b)
		return 0;
	const struct pkt *p = &scratch->p;
	struct verdict *v = &scratch->v;

	if (!snat_to(&v->server, p, fe, b))
		return 0;
	v->generation = backend_generation(b);
	int is_new = pkt_opens_flow(p), first_only = is_new && !snat_is_later(v->hash);

#pragma clang loop unroll(full)
	for (__u32 i = 0; i < SNAT_TRIES; i++) {
		if (i && first_only)
			break;
		snat_candidate(&v->server, p, v, fe, b, i);
		if (is_new && snat_use(v, &age) != SNAT_HALF_OPEN)
			continue;
		if (snat_is_half_open(v, b, backend))
			return 1;
	}
	return 0;
}

/* How a SYN compares to the connection that its server may keep in TIME_WAIT. */
enum snat_syn {
	SYN_OLD, /* the server may not accept it */
	SYN_NEWER, /* by its timestamp only; servers that follow RFC 6191 accept it */
	SYN_LATER, /* by its sequence number, so servers that follow only RFC 1122, 4.2.2.13, accept it */
};

static __always_inline enum snat_syn snat_compare(const struct pkt *p, const struct verdict *v,
						  const struct server_flow *s)
{
	int seq = (__s32)(p->seq - s->f.ack) > 0, stamped = p->tsval && s->client_end;

	if (!flow_in_time_wait(&s->f) || p->key.proto != IPPROTO_TCP)
		return SYN_OLD;
	/* The server resends data that the client has not acknowledged to whoever has the source by then. */
	if (s->figures.fin != FIN_ACKNOWLEDGED && !client_key_equal(&s->client, &v->client))
		return SYN_OLD;
	if (stamped && (__s32)(p->tsval - s->client_end) <= 0)
		return SYN_OLD;
	if (!seq && !stamped)
		return SYN_OLD;
	return seq ? SYN_LATER : SYN_NEWER;
}

/* snat_claimable returns how a new flow can claim the source (enum claim), or 0, and the age of the half-open flow that
 * has it. For UDP it must be certain that no answer will still come, because another client would receive it. */
static __always_inline enum claim snat_claimable(const struct pkt *p, const struct verdict *v, __u32 *age)
{
	int stream = pkt_is_stream(p);
	struct server_flow *s;

	if (stream) {
		s = bpf_map_lookup_elem(&sy_halfopen_servers, &v->server);
		if (s) {
			*age = flow_elapsed(s->f.seen, v->now);
			return s->f.state == FLOW_CLOSED || client_key_equal(&s->client, &v->client) ||
					       flow_server_ended(s) ?
				       CLAIM_OVER :
				       CLAIM_EVICT;
		}
	}
	s = flow_find_server(&v->server, stream);
	if (!s)
		return CLAIM_FREE;
	if ((s->f.state == FLOW_CLOSED && s->figures.fin == FIN_OVER) || flow_server_expired(s, stream, v->now))
		return CLAIM_RESTED;
	switch (snat_compare(p, v, s)) {
	case SYN_LATER:
		return CLAIM_RESTED;
	case SYN_NEWER:
		return CLAIM_TIME_WAIT;
	default:
		if (s->f.state != FLOW_CLOSED)
			snat_set_use(v, SNAT_ESTABLISHED);
		return 0;
	}
}

/* snat_choose sets a new flow's backend, its source in v->server, what its packets become, and how it claims the
 * source. It tries the choices starting at from. If none is free, it takes one whose server accepts the SYN in
 * TIME_WAIT, or else evicts the oldest half-open flow, so that a real client has time to confirm in a flood. */
__noinline int snat_choose(struct frontend *fe, __u32 backend, __u32 from)
{
	struct scratch *scratch = scratch_get();
	struct backend *b = backend_get(backend);
	__u32 most = 0, age = 0;

	if (!fe || !scratch || !b)
		return 0;
	const struct pkt *p = &scratch->p;
	struct verdict *v = &scratch->v;

	if (!snat_to(&v->server, p, fe, b))
		return 0;
	v->generation = backend_generation(b);
	v->claim = 0;
#pragma clang loop unroll(full)
	for (__u32 i = 0; i < SNAT_TRIES; i++) {
		snat_candidate(&v->server, p, v, fe, b, from + i);
		enum snat_use use = snat_use(v, &age);

		if (use == SNAT_ESTABLISHED)
			continue;
		enum claim claim = use == SNAT_HALF_OPEN ? CLAIM_EVICT : snat_claimable(p, v, &age);

		if (claim == CLAIM_FREE || claim == CLAIM_RESTED || claim == CLAIM_OVER) {
			v->claim = claim;
			v->later = from + i != 0;
			snat_verdict(v, b, backend);
			return 1;
		}
		if (claim == CLAIM_EVICT && (v->claim == CLAIM_TIME_WAIT || (v->claim && age <= most)))
			continue;
		if (claim) {
			v->later = i; /* not in a register, because the verifier would follow each value separately */
			most = age;
			v->claim = claim;
		}
	}
	if (!v->claim)
		return 0;
	from += v->later;
	v->later = from != 0;
	snat_candidate(&v->server, p, v, fe, b, from);
	v->claim = snat_claimable(p, v, &age);
	snat_verdict(v, b, backend);
	return v->claim != 0;
}
