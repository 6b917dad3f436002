/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/* Counters, and state per backend and client that is stored when a flow opens. */
#pragma once
#include "decide.h"

static __always_inline int flow_is_new(const struct pkt *p, const struct verdict *v)
{
	return (v->commit == COMMIT_OPEN || v->commit == COMMIT_DSR_MARK || v->commit == COMMIT_DSR_OPEN) &&
	       pkt_opens_flow(p);
}

static __always_inline void traffic_add(struct traffic *t, const struct pkt *p, const struct verdict *v,
					int is_new)
{
	if (!t)
		return;
	t->packets++;
	t->bytes += p->len;
	t->flows += is_new;
	t->replies += v->reply;
}

static __always_inline void verdict_count(const struct pkt *p, const struct verdict *v)
{
	__u32 k = v->action * REASON_MAX + v->reason;
	__u64 *n = bpf_map_lookup_elem(&sy_verdicts, &k);
	int is_new = flow_is_new(p, v);

	if (n)
		(*n)++;
	if (v->counted)
		traffic_add(frontend_traffic(v->frontend), p, v, is_new);
	if (v->counted == 2 && v->action == ACTION_FORWARD)
		traffic_add(backend_traffic(v->backend), p, v, is_new);
}

/* flow_continued counts a flow that the server's answer has reached. */
static __always_inline void flow_continued(const struct verdict *v)
{
	struct traffic *f = frontend_traffic(v->frontend), *b = backend_traffic(v->backend);

	if (f)
		f->continued++;
	if (b)
		b->continued++;
}

/* handshake_count adds a handshake time to its backend's. */
static __always_inline void handshake_count(__u32 backend, __u32 took)
{
	struct handshakes *h = CHUNK_LOOKUP(&sy_be_handshakes, backend, COUNTER_CHUNK);
	__u32 i = 0;

#pragma clang loop unroll(full)
	for (int shift = HANDSHAKE_FIRST; shift < HANDSHAKE_FIRST + HANDSHAKE_BUCKETS - 1; shift++)
		i += took >> shift != 0;
	if (!h || i >= HANDSHAKE_BUCKETS)
		return;
	__sync_fetch_and_add(&h->sum, took);
	__sync_fetch_and_add(&h->n[i], 1);
}

/* backend_load_add changes the number of open flows of a backend by n. */
static __always_inline void backend_load_add(__u32 backend, int n)
{
	__u32 *l = bpf_map_lookup_elem(&sy_backend_load, &backend);

	if (l && (n > 0 || *l > 0))
		__sync_fetch_and_add(l, n);
}

/* affinity_store stores the backend of a client's new flow. */
static __always_inline void affinity_store(const struct addr *client, __u32 frontend, __u32 backend, __u64 now)
{
	struct affinity_key k = { .client = *client, .frontend = frontend };
	struct affinity a = { .backend = backend, .epoch = member_epoch_now(frontend, backend), .seen = now };

	bpf_map_update_elem(&sy_affinity, &k, &a, BPF_ANY);
}

/* flow_opened counts the flow for its backend, and stores the backend for the client if the frontend has affinity. */
static __always_inline void flow_opened(const struct pkt *p, const struct verdict *v, __u64 now)
{
	if (!pkt_opens_flow(p))
		return;
	backend_load_add(v->backend, 1);
	if (v->affinity)
		affinity_store(&p->key.t.src, v->frontend, v->backend, now);
}
