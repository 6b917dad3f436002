/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/* commit: the only writer. It runs when the packet can be sent, and before it is: a flow may only be opened with a
 * source port that is surely ours, and taking one is a write that can fail. It then turns the verdict into a drop. */
#pragma once
#include "decide.h"
#include "work.h"

#define SNAT_TRIES 32
#define SNAT_POLITE 8 /* tries before the port of another flow is taken over */

static __always_inline void count(const struct pkt *p, const struct verdict *v)
{
	__u32 k = v->action * REASON_MAX + v->reason;
	__u64 *n = bpf_map_lookup_elem(&verdicts, &k);

	if (n)
		(*n)++;
	if (v->counted) {
		k = v->frontend;
		struct traffic *t = bpf_map_lookup_elem(&by_frontend, &k);

		if (t) {
			t->packets++;
			t->bytes += p->len;
			t->flows += v->commit == COMMIT_OPEN && opens(p);
		}
	}
	if (v->counted == 2 && v->action == ACTION_FORWARD) {
		k = v->backend;
		struct traffic *t = bpf_map_lookup_elem(&by_backend, &k);

		if (t) {
			t->packets++;
			t->bytes += p->len;
			t->flows += v->commit == COMMIT_OPEN && opens(p);
		}
	}
}

static __always_inline void give_up(struct verdict *v, enum reason r)
{
	v->action = ACTION_DROP;
	v->reason = r;
	v->commit = COMMIT_NONE;
}

/* forget removes both directions of a flow, given the key of one. */
static __always_inline void forget(const struct flow_key *k)
{
	struct flow *f = bpf_map_lookup_elem(&flows, k);

	if (!f)
		return;
	struct flow_key other = twin_key(f, k->proto);

	bpf_map_delete_elem(&flows, &other);
	bpf_map_delete_elem(&flows, k);
}

/* add_load notes that a backend has one flow more or less. */
static __always_inline void add_load(__u32 backend, int n)
{
	__u32 *l = bpf_map_lookup_elem(&load, &backend);

	if (l && (n > 0 || *l > 0))
		__sync_fetch_and_add(l, n);
}

/* owns reports whether the reply direction r is that of the client's direction k, which may be gone or another flow's. */
static __always_inline int owns(const struct flow *r, const struct flow_key *k)
{
	return r->t.dport == k->t.sport && r->t.sport == k->t.dport && same_address(r->t.dst.w, k->t.src.w) &&
	       same_address(r->t.src.w, k->t.dst.w);
}

/* push_out ends a flow whose client has not proved that it is there, given the key of its reply direction. A flood would keep
 * all ports busy otherwise; who is there tries again. */
static __always_inline void push_out(const struct flow_key *k)
{
	struct flow *r = bpf_map_lookup_elem(&halfopen, k), *f;

	if (!r)
		return;
	struct flow_key client = twin_key(r, k->proto);

	f = bpf_map_lookup_elem(&halfopen, &client);
	if (f && f->t.sport == k->t.dport)
		bpf_map_delete_elem(&halfopen, &client);
	bpf_map_delete_elem(&halfopen, k);
}

/* take_port writes the reply direction of a new flow under k, if no other flow has it that it may not push out. */
static __always_inline int take_port(const struct flow_key *k, const struct flow *reply, int polite)
{
	if (!polite)
		push_out(k);
	if (bpf_map_update_elem(&halfopen, k, reply, BPF_NOEXIST))
		return 0;
	struct flow *f = bpf_map_lookup_elem(&flows, k);

	if (!f)
		return 1;
	if (!polite && f->state == FLOW_CLOSED) {
		forget(k);
		return 1;
	}
	bpf_map_delete_elem(&halfopen, k);
	return 0;
}

/* source writes what the backend is to see as the source at the n-th try: one of our addresses and ports; or, on this
 * machine, the client, and only when it has a flow to the backend from that port (by another VIP) another port. */
static __always_inline void source(struct flow_key *k, const struct pkt *p, const struct verdict *v, const struct backend *b,
				   __u32 start, __u32 n)
{
	__u32 range = (__u32)snat_last - snat_first + 1;

	/* 7919 is prime to any range below it and spreads the tries over larger ones. */
	k->t.dport = bpf_htons(snat_first + (start + n * 7919) % range);
	if (v->here) {
		if (!n)
			k->t.dport = p->key.t.sport;
		return;
	}
	const struct addr *ours = &b->snat[(start + n) & (SNATS - 1)];

	k->t.dst = is_zero(ours) ? b->snat[0] : *ours;
}

/* older_than reports whether the half-open flow with the reply key k has been silent for longer than one last seen at best, and
 * then makes best its time. */
static __always_inline int older_than(const struct flow_key *k, __u64 *best)
{
	struct flow *r = bpf_map_lookup_elem(&halfopen, k);

	if (!r || r->seen >= *best)
		return 0;
	*best = r->seen;
	return 1;
}

/* open_nat takes a source address and port that no flow to this backend has, and writes both directions. */
static __always_inline void open_nat(const struct pkt *p, struct verdict *v, __u64 now)
{
	struct flow reply = { .t = reversed(&p->key.t), .frontend = v->frontend, .backend = v->backend, .method = METHOD_NAT,
			      .here = v->here, .state = FLOW_HALF_OPEN, .reply = 1, .seen = now };
	struct flow_key k = { .t = reversed(&v->t), .proto = p->key.proto };
	struct backend *b = bpf_map_lookup_elem(&backends, &v->backend);
	__u32 start = bpf_get_prandom_u32();

	__u32 oldest = SNAT_POLITE;
	__u64 seen = ~0ULL;

	forget(&p->key); /* one that is over */
	for (__u32 i = 0; i < SNAT_TRIES && b; i++) {
		/* The oldest of several: in a flood who is there has time to prove it. */
		source(&k, p, v, b, start, i == SNAT_POLITE ? oldest : i);
		if (!take_port(&k, &reply, i < SNAT_POLITE)) {
			if (i < SNAT_POLITE && older_than(&k, &seen))
				oldest = i;
			continue;
		}
		v->t = reversed(&k.t);
		struct flow f = { .t = v->t, .frontend = v->frontend, .backend = v->backend, .method = METHOD_NAT,
				  .here = v->here, .state = FLOW_HALF_OPEN, .seen = now };

		if (bpf_map_update_elem(&halfopen, &p->key, &f, BPF_ANY))
			give_up(v, REASON_INTERNAL);
		return;
	}
	give_up(v, REASON_SNAT_FULL);
}

/* open_oneway writes a new flow. One that cannot be written is forwarded all the same. */
static __always_inline void open_oneway(const struct pkt *p, const struct verdict *v, __u64 now)
{
	struct flow f = { .t = v->t, .frontend = v->frontend, .backend = v->backend, .method = v->method,
			  .state = FLOW_HALF_OPEN, .seen = now };
	__u64 bit, *word = pending_bit(v->hash, &bit);

	bpf_map_delete_elem(&oneway, &p->key); /* one that is over */
	bpf_map_update_elem(&halfopen, &p->key, &f, BPF_ANY);
	if (word && !v->pending)
		__sync_fetch_and_or(word, bit);
}

static __always_inline void open_flow(const struct pkt *p, struct verdict *v, __u64 now)
{
	if (v->method == METHOD_NAT)
		open_nat(p, v, now);
	else
		open_oneway(p, v, now);
	if (v->commit != COMMIT_OPEN || !opens(p))
		return;
	add_load(v->backend, 1);
	if (!v->sticky)
		return;
	struct affinity_key k = { .client = p->key.t.src, .frontend = v->frontend };
	struct affinity a = { .backend = v->backend, .seen = now };

	bpf_map_update_elem(&affinities, &k, &a, BPF_ANY);
}

/* take_turn makes the next new flow of this frontend take the next slot. */
static __always_inline void take_turn(__u32 frontend)
{
	__u32 *n = bpf_map_lookup_elem(&turns, &frontend);

	if (n)
		(*n)++;
}

/* settle_oneway clears the pending bit of a flow that has gone on. Another flow with the same bit then waits for a sampled
 * packet. */
static __always_inline void settle_oneway(const struct verdict *v)
{
	__u64 bit, *word = pending_bit(v->hash, &bit);

	if (word)
		__sync_fetch_and_and(word, ~bit);
}

static __always_inline void prove_oneway(const struct pkt *p, const struct flow *f, __u64 now)
{
	struct flow moved = *f;

	moved.state = FLOW_ESTABLISHED;
	moved.seen = now;
	bpf_map_update_elem(&oneway, &p->key, &moved, BPF_ANY);
	bpf_map_delete_elem(&halfopen, &p->key);
}

/* prove moves both directions to the established table. */
static __always_inline void prove(const struct pkt *p, struct verdict *v, const struct flow *f, __u64 now)
{
	struct flow_key k = twin_key(f, p->key.proto);
	struct flow fwd = *f;
	struct flow reply = { .t = reversed(&p->key.t), .frontend = f->frontend, .backend = f->backend, .method = METHOD_NAT,
			      .here = f->here, .state = FLOW_ESTABLISHED, .reply = 1, .seen = now };

	struct flow *r = bpf_map_lookup_elem(&halfopen, &k);

	if (r && !owns(r, &p->key)) { /* its port went to another flow */
		bpf_map_delete_elem(&halfopen, &p->key);
		give_up(v, REASON_NO_FLOW);
		return;
	}
	fwd.state = reply.state = p->flags & TCP_FIN ? FLOW_CLOSING : FLOW_ESTABLISHED;
	fwd.fin = (p->flags & TCP_FIN) != 0;
	fwd.seq = p->ack;
	fwd.seen = now;
	if (bpf_map_update_elem(&flows, &k, &reply, BPF_NOEXIST)) {
		give_up(v, REASON_FLOWS_FULL);
		return;
	}
	if (bpf_map_update_elem(&flows, &p->key, &fwd, BPF_ANY)) {
		bpf_map_delete_elem(&flows, &k);
		give_up(v, REASON_FLOWS_FULL);
		return;
	}
	bpf_map_delete_elem(&halfopen, &k);
	bpf_map_delete_elem(&halfopen, &p->key);
}

/* close notes a FIN or RST, which concerns both directions. A one-way flow only hears one side: its FIN is the end. */
static __always_inline void close_flow(const struct pkt *p, struct flow *f, struct flow *other)
{
	__u8 state = FLOW_CLOSED;

	if (p->flags & TCP_FIN && !(p->flags & TCP_RST)) {
		f->fin = 1;
		if (!other || !other->fin)
			state = FLOW_CLOSING;
	}
	if (f->state != FLOW_CLOSED && state == FLOW_CLOSED)
		add_load(f->backend, -1);
	f->state = state;
	if (other)
		other->state = state;
}

/* note_path remembers what a router said of the way to a backend. */
static __always_inline void note_path(const struct pkt *p, __u64 now)
{
	struct path *path = bpf_map_lookup_elem(&paths, &p->key.t.src);

	if (!path)
		return;
	path->mtu = p->mtu;
	path->seen = now;
}

/* note_fragments remembers the ports of a datagram whose first fragment this is. */
static __always_inline void note_fragments(const struct pkt *p)
{
	struct fragment_key k = { .src = p->key.t.src, .dst = p->key.t.dst, .id = p->id, .proto = p->key.proto };
	struct fragment f = { p->key.t.sport, p->key.t.dport };

	bpf_map_update_elem(&fragments, &k, &f, BPF_ANY);
}

static __always_inline void write(const struct pkt *p, struct verdict *v, struct flow *f)
{
	__u64 now = bpf_ktime_get_coarse_ns();

	if (v->commit == COMMIT_PATH) {
		note_path(p, now);
		return;
	}
	if (v->pending && v->commit != COMMIT_OPEN)
		settle_oneway(v);
	if (v->commit == COMMIT_OPEN) {
		open_flow(p, v, now);
		if (v->commit == COMMIT_OPEN)
			take_turn(v->frontend);
	}
	if (p->fragment == FIRST && v->action == ACTION_FORWARD)
		note_fragments(p);
	if (!f || v->commit == COMMIT_NONE)
		return;
	if (v->commit == COMMIT_PROVE && f->method != METHOD_NAT) {
		prove_oneway(p, f, now);
		return;
	}
	if (v->commit == COMMIT_PROVE) {
		prove(p, v, f, now);
		return;
	}
	f->seen = now;
	if (f->method == METHOD_NAT && !f->reply && p->flags & TCP_ACK && !v->half)
		f->seq = p->ack;
	if (v->commit != COMMIT_ANSWER && v->commit != COMMIT_CLOSE)
		return;

	struct flow *other = 0;

	if (f->method == METHOD_NAT) {
		struct flow_key k = twin_key(f, p->key.proto);
		__u8 half;

		other = find(&k, &half);
		/* The client may have begun another flow from the same port: then that entry is not our other half. */
		if (other && other->t.sport != p->key.t.dport && f->reply)
			other = 0;
	}
	if (v->commit == COMMIT_CLOSE) {
		close_flow(p, f, other);
	} else if (other) {
		other->answered = 1;
		other->seq = p->seq;
	}
}

/* commit writes what the verdict on the packet asks for; f is what decide returned. */
__noinline int commit(struct flow *f)
{
	struct work *w = work();

	if (w)
		write(&w->p, &w->v, f);
	return 0;
}

/* lost counts a packet that could not be made what its verdict asked for. */
__noinline int lost(void)
{
	struct work *w = work();

	if (!w)
		return 0;
	w->v.counted = 0;
	say(&w->v, ACTION_DROP, REASON_INTERNAL);
	count(&w->p, &w->v);
	return 0;
}
