/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/* commit: the only step that writes flows and counters. It runs once route has found that the packet can be sent, but
 * before it is sent, because a new flow must claim a source port. If that write fails, the verdict becomes a drop. */
#pragma once
#include "account.h"
#include "dsr_commit.h"
#include "nat_commit.h"
#include "scratch.h"

/* pmtu_learn stores the path MTU that a router reported. */
static __always_inline void pmtu_learn(const struct pkt *p, __u64 now)
{
	struct pmtu *path = bpf_map_lookup_elem(&sy_pmtu, &p->key.t.src);

	if (!path)
		return;
	path->mtu = p->mtu;
	path->seen = now;
}

/* frag_learn stores a datagram's ports from its first fragment. */
static __always_inline void frag_learn(const struct pkt *p)
{
	struct fragment_key k = { .src = p->key.t.src, .dst = p->key.t.dst, .id = p->frag_id, .proto = p->key.proto };
	struct fragment f = { p->key.t.sport, p->key.t.dport };

	bpf_map_update_elem(&sy_frags, &k, &f, BPF_ANY);
}

/* relay_forget removes the entry of relay_learn. */
static __always_inline void relay_forget(const struct pkt *p, const struct verdict *v)
{
	if (!bpf_map_delete_elem(&sy_relays, &p->key))
		share_add(&sy_relay_share, v->client.frontend, -1);
}

/* relay_learn stores the nodes to which a datagram is sent, except the last one, which is this node. It adds no entry
 * if the frontend has used its share. */
static __always_inline void relay_learn(const struct pkt *p, const struct verdict *v)
{
	struct relay r = { .next = { v->t.dst, v->chain.next[0], v->chain.next[1] },
			   .n = v->chain.n,
			   .seen = flow_clock() };

	if (!bpf_map_update_elem(&sy_relays, &p->key, &r, BPF_EXIST) ||
	    share_is_full(&sy_relay_share, v->client.frontend, RELAYS))
		return;
	if (!bpf_map_update_elem(&sy_relays, &p->key, &r, BPF_NOEXIST))
		share_add(&sy_relay_share, v->client.frontend, 1);
}

/* commit writes what the verdict requires. side is the entry that decide returned. */
__noinline int commit(struct flow_side *side)
{
	struct flow *f = (struct flow *)side;
	struct scratch *scratch = scratch_get();

	if (!scratch)
		return 0;
	const struct pkt *p = &scratch->p;
	struct verdict *v = &scratch->v;
	__u64 now = bpf_ktime_get_coarse_ns();

	if (v->commit == COMMIT_PMTU) {
		pmtu_learn(p, now);
		return 0;
	}
	if (local_delivery && v->commit == COMMIT_RELAY) {
		relay_learn(p, v);
		return 0;
	}
	if (local_delivery && v->commit == COMMIT_FORGET) {
		relay_forget(p, v);
		return 0;
	}
	if (v->commit >= COMMIT_DSR_MARK)
		dsr_write(p, v, now);
	if (v->commit == COMMIT_OPEN) {
		nat_write_open(scratch, now);
		if (local_delivery && !pkt_is_stream(p)) /* no previous node has the flow */
			relay_forget(p, v);
		if (v->commit == COMMIT_OPEN)
			flow_opened(p, v, now);
	}
	if (p->fragment == FRAG_FIRST && v->action == ACTION_FORWARD)
		frag_learn(p);
	if (f)
		flow_count(p, v, f);
	if (f && v->commit != COMMIT_NONE)
		nat_write(scratch, f);
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
