/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/* commit, for direct-return flows. */
#pragma once
#include "account.h"

/* dsr_store writes an entry. If the write fails, the packet is forwarded anyway. */
static __always_inline void dsr_store(void *map, const struct pkt *p, const struct verdict *v, __u8 state, __u64 now)
{
	struct dsr_flow f = { .frontend = v->frontend,
			      .backend = v->backend,
			      .method = v->method,
			      .state = state,
			      .seen = now,
			      .generation = v->generation };

	bpf_map_update_elem(map, &p->key, &f, BPF_ANY);
}

/* dsr_set_pending sets or clears a flow's pending bit. If this clears the bit of another flow that shares it, a sampled
 * packet writes that flow's entry. */
static __always_inline void dsr_set_pending(const struct verdict *v, int pending)
{
	__u64 bit, *word = dsr_pending_bit(v->hash, &bit);

	if (!word || pending == v->dsr_pending)
		return;
	if (pending)
		__sync_fetch_and_or(word, bit);
	else
		__sync_fetch_and_and(word, ~bit);
}

/* dsr_follow updates a flow's entry. Only one direction passes here, so one FIN ends the flow. The client's next packet
 * is looked up. If its sequence number does not follow the FIN, the FIN was forged, and the flow continues. */
static __always_inline void dsr_follow(const struct pkt *p, const struct verdict *v, struct dsr_flow *f, __u64 now)
{
	if (pkt_is_stream(p) && pkt_opens_flow(p) && f->state != FLOW_HALF_OPEN) {
		if (f->state >= FLOW_CLOSING || f->asked)
			return;
		f->asked = 1;
	} else if (v->commit == COMMIT_DSR_CLOSE) {
		if (f->state < FLOW_CLOSING)
			backend_load_add(f->backend, -1);
		f->state = p->flags & TCP_RST ? FLOW_CLOSED : FLOW_CLOSING;
		f->end = p->seq + p->payload + (p->flags & TCP_FIN);
		f->asked = 0;
		dsr_set_pending(v, 1);
	} else {
		if (f->state >= FLOW_CLOSING && (p->key.proto == IPPROTO_SCTP || f->end != (__u8)p->seq)) {
			backend_load_add(f->backend, 1);
			f->state = FLOW_ESTABLISHED;
		}
		if (f->state != FLOW_CLOSING)
			f->asked = 0;
		else if (elapsed(f->seen, now) >
			 DSR_PATIENCE) /* not the last acknowledgement: the server still sends */
			f->asked = 1;
		if (f->state != FLOW_HALF_OPEN && (f->state != FLOW_CLOSING || f->asked))
			dsr_set_pending(v, 0);
	}
	f->seen = now;
}

/* dsr_write writes what the verdict on a packet of a direct-return flow requires. */
static __always_inline void dsr_write(const struct pkt *p, const struct verdict *v, __u64 now)
{
	struct dsr_flow *f;

	switch (v->commit) {
	case COMMIT_DSR_MARK:
		dsr_set_pending(v, 1);
		return;
	case COMMIT_DSR_OPEN:
		bpf_map_delete_elem(&sy_dsr_flows, &p->key); /* a closed flow with the same key */
		dsr_store(&sy_dsr_halfopen, p, v, FLOW_HALF_OPEN, now);
		flow_opened(p, v, now);
		return;
	case COMMIT_DSR_STORE:
	case COMMIT_DSR_CONFIRM:
		dsr_store(&sy_dsr_flows, p, v, FLOW_ESTABLISHED, now);
		flow_continued(v);
		if (bpf_map_delete_elem(&sy_dsr_halfopen, &p->key)) /* the load did not count the flow when it opened */
			backend_load_add(v->backend, 1);
		dsr_set_pending(v, 0);
		return;
	default:
		break;
	}
	f = dsr_find(&p->key);
	if (f)
		dsr_follow(p, v, f, now);
}
