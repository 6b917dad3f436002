/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/* commit: the only writer. It runs when the packet can be sent, and before it is sent: a flow may only be opened
 * with a source port of its own, and claiming one is a write that can fail. The verdict then becomes a drop. */
#pragma once
#include "account.h"
#include "dsr_commit.h"
#include "scratch.h"
#include "snat.h"

/* flow_is_reverse reports whether r is the reply direction of the flow with the client's key k. It may be missing
 * or belong to another flow. */
static __always_inline int flow_is_reverse(const struct flow *r, const struct flow_key *k)
{
	return r->t.dport == k->t.sport && r->t.sport == k->t.dport && addr_equal(r->t.dst.w, k->t.src.w) &&
	       addr_equal(r->t.src.w, k->t.dst.w);
}

/* flow_confirm moves both directions to the table of established flows. */
static __always_inline void flow_confirm(const struct pkt *p, struct verdict *v, const struct flow *f, __u64 now)
{
	struct flow_key k = flow_reverse_key(f, p->key.proto);
	struct flow fwd = *f;
	struct flow reply = { .t = tuple_reverse(&p->key.t),
			      .frontend = f->frontend,
			      .backend = f->backend,
			      .local = f->local,
			      .state = FLOW_ESTABLISHED,
			      .reply = 1,
			      .seen = now };

	struct flow *r = bpf_map_lookup_elem(&sy_halfopen, &k);

	if (r && !flow_is_reverse(r, &p->key)) { /* another flow took the port */
		bpf_map_delete_elem(&sy_halfopen, &p->key);
		verdict_drop(v, REASON_NO_FLOW);
		return;
	}
	fwd.state = reply.state = p->flags & TCP_FIN ? FLOW_CLOSING : FLOW_ESTABLISHED;
	fwd.fin = (p->flags & TCP_FIN) != 0;
	fwd.seq = p->ack;
	fwd.seen = now;
	if (bpf_map_update_elem(&sy_flows, &k, &reply, BPF_NOEXIST)) {
		verdict_drop(v, REASON_FLOWS_FULL);
		return;
	}
	if (bpf_map_update_elem(&sy_flows, &p->key, &fwd, BPF_ANY)) {
		bpf_map_delete_elem(&sy_flows, &k);
		verdict_drop(v, REASON_FLOWS_FULL);
		return;
	}
	bpf_map_delete_elem(&sy_halfopen, &k);
	bpf_map_delete_elem(&sy_halfopen, &p->key);
}

/* flow_close records a FIN or RST for both directions. */
static __always_inline void flow_close(const struct pkt *p, struct flow *f, struct flow *other)
{
	__u8 state = FLOW_CLOSED;

	if (p->flags & TCP_FIN && !(p->flags & TCP_RST)) {
		f->fin = 1;
		if (!other || !other->fin)
			state = FLOW_CLOSING;
	}
	if (f->state != FLOW_CLOSED && state == FLOW_CLOSED)
		backend_load_add(f->backend, -1);
	f->state = state;
	if (other)
		other->state = state;
}

/* pmtu_learn stores the path MTU that a router reported. */
static __always_inline void pmtu_learn(const struct pkt *p, __u64 now)
{
	struct pmtu *path = bpf_map_lookup_elem(&sy_pmtu, &p->key.t.src);

	if (!path)
		return;
	path->mtu = p->mtu;
	path->seen = now;
}

/* frag_learn stores the ports of a datagram, given its first fragment. */
static __always_inline void frag_learn(const struct pkt *p)
{
	struct fragment_key k = { .src = p->key.t.src, .dst = p->key.t.dst, .id = p->frag_id, .proto = p->key.proto };
	struct fragment f = { p->key.t.sport, p->key.t.dport };

	bpf_map_update_elem(&sy_frags, &k, &f, BPF_ANY);
}

static __always_inline void flow_write(const struct pkt *p, struct verdict *v, struct flow *f)
{
	__u64 now = bpf_ktime_get_coarse_ns();

	if (v->commit == COMMIT_PMTU) {
		pmtu_learn(p, now);
		return;
	}
	if (v->commit >= COMMIT_DSR_MARK)
		dsr_write(p, v, now);
	if (v->commit == COMMIT_OPEN) {
		flow_open_nat(p, v, now);
		if (v->commit == COMMIT_OPEN)
			flow_opened(p, v, now);
	}
	if (p->fragment == FRAG_FIRST && v->action == ACTION_FORWARD)
		frag_learn(p);
	if (!f || v->commit == COMMIT_NONE)
		return;
	if (v->commit == COMMIT_CONFIRM) {
		flow_confirm(p, v, f, now);
		return;
	}
	f->seen = now;
	if (!f->reply && p->flags & TCP_ACK && !v->half_open)
		f->seq = p->ack;
	if (v->commit != COMMIT_ANSWER && v->commit != COMMIT_CLOSE)
		return;

	struct flow_key k = flow_reverse_key(f, p->key.proto);
	__u8 half;
	struct flow *other = flow_find(&k, &half);

	/* The client may have opened another flow from the same port; then that entry is not the other direction of
	 * this one. */
	if (other && other->t.sport != p->key.t.dport && f->reply)
		other = 0;
	if (v->commit == COMMIT_CLOSE) {
		flow_close(p, f, other);
	} else if (other) {
		other->answered = 1;
		other->seq = p->seq;
	}
}

/* commit_needed reports whether commit has anything to write. */
static __always_inline int commit_needed(const struct scratch *s)
{
	return s->v.commit != COMMIT_NONE || s->p.fragment == FRAG_FIRST;
}

/* commit writes what the verdict requires; f is the flow that decide returned. */
__noinline int commit(struct flow *f)
{
	struct scratch *s = scratch_get();

	if (s)
		flow_write(&s->p, &s->v, f);
	return 0;
}

/* verdict_internal_error counts a packet that could not be transformed as its verdict specifies. */
__noinline int verdict_internal_error(void)
{
	struct scratch *s = scratch_get();

	if (!s)
		return 0;
	s->v.counted = 0;
	verdict_set(&s->v, ACTION_DROP, REASON_INTERNAL_ERROR);
	verdict_count(&s->p, &s->v);
	return 0;
}
