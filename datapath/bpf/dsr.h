/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/* decide, for direct server return (DSR): METHOD_DSR and the tunnels. The server answers the client directly, so only
 * the client's direction passes here. */
#pragma once
#include "nat.h"
#include "pmtu.h"

/* tunnel_set_ports derives the outer source port from the flow hash, so that ECMP spreads flows. */
static __always_inline void tunnel_set_ports(struct verdict *v)
{
	v->t.sport = bpf_htons(TUNNEL_SPORT_FIRST | (v->hash & 0x3fff));
	v->t.dport = bpf_htons(tunnel_port);
}

/* dsr_pending_bit returns the word of sy_dsr_pending for a hash, and the bit in it. */
static __always_inline __u64 *dsr_pending_bit(__u32 h, __u64 *bit)
{
	__u32 i = (h >> 6) % DSR_PENDING_WORDS;

	*bit = 1ULL << (h & 63);
	return bpf_map_lookup_elem(&sy_dsr_pending, &i);
}

static __always_inline struct dsr_flow *dsr_find(const struct flow_key *k)
{
	struct dsr_flow *f = bpf_map_lookup_elem(&sy_dsr_flows, k);

	return f ? f : bpf_map_lookup_elem(&sy_dsr_halfopen, k);
}

/* dsr_timeout_closing: replies do not pass here, so a flow whose client has sent FIN counts as ended until a later
 * packet shows that it continues. With a longer timeout, many such entries would evict the entries of idle flows. */
static __always_inline __u64 dsr_timeout_closing(const struct dsr_flow *f)
{
	return f->asked || timeout_closing < timeout_time_wait ? timeout_closing : timeout_time_wait;
}

static __always_inline int dsr_expired(const struct dsr_flow *f, __u8 proto, __u64 now)
{
	/* The last two are longer because only a sample of the packets refreshes the entry. */
	__u64 t = f->state == FLOW_CLOSED    ? timeout_closed :
		  f->state == FLOW_CLOSING   ? dsr_timeout_closing(f) :
		  f->state == FLOW_HALF_OPEN ? timeout_half_open :
		  proto == IPPROTO_UDP	     ? 4 * timeout_udp :
					       4 * timeout_established;

	return elapsed(f->seen, now) > t;
}

/* dsr_is_over reports whether a SYN opens a new flow that replaces the one in an entry. The SYN may be forged, and so
 * may a FIN or RST before it. If the flow continues, its server receives the SYN and answers as it would without us
 * (RFC 5961, 4.2). A client that needs a new flow sends its third SYN 3 s after the first (RFC 6298). */
#define DSR_PATIENCE (SECOND * 5 / 2)

static __always_inline int dsr_is_over(const struct dsr_flow *f, __u64 now)
{
	return (f->asked || f->state >= FLOW_CLOSING) && elapsed(f->seen, now) > DSR_PATIENCE;
}

/* dsr_valid reports whether an entry still determines the backend. A SYN may open a new connection at its server, so
 * its client must still be allowed. */
static __always_inline int dsr_valid(const struct pkt *p, const struct dsr_flow *f, const struct frontend *fe)
{
	__u64 now = bpf_ktime_get_coarse_ns();
	struct backend *b = backend_get(f->backend);

	if (!b || flow_ended(f->frontend, f->backend, f->generation, backend_generation(b)))
		return 0;
	if (f->method != fe->method)
		return 0;
	if (pkt_is_stream(p) && pkt_opens_flow(p) && (dsr_is_over(f, now) || !frontend_allows(fe, &p->key.t.src)))
		return 0;
	return !dsr_expired(f, p->key.proto, now);
}

/* dsr_forward sends a packet to the verdict's backend with direct return. */
static __always_inline struct flow *dsr_forward(const struct pkt *p, struct verdict *v, __u8 method, enum commit c)
{
	struct backend *b = backend_get(v->backend);

	if (!b || addr_is_zero(&b->snat[0]))
		return verdict_fail(p, v, REASON_NO_ROUTE);
	v->method = method;
	v->keyed = b->keyed;
	v->generation = backend_generation(b);
	v->t.src = b->snat[0];
	v->t.dst = b->addr;
	tunnel_set_ports(v);
	v->counted = 2;
	v->commit = c;
	return verdict_set(v, ACTION_FORWARD, REASON_FORWARDED);
}

static __always_inline struct flow *decide_dsr_known(const struct pkt *p, struct verdict *v, const struct dsr_flow *f)
{
	enum commit c = COMMIT_DSR_TOUCH;

	if (pkt_without_l4(p))
		c = COMMIT_NONE;
	else if (pkt_is_stream(p) && p->flags & (TCP_FIN | TCP_RST))
		c = COMMIT_DSR_CLOSE;
	else if (f->state == FLOW_HALF_OPEN && (!pkt_is_stream(p) || p->flags & TCP_ACK))
		c = COMMIT_DSR_CONFIRM;
	v->backend = f->backend;
	dsr_forward(p, v, f->method, c);
	v->generation = f->generation;
	return 0;
}

/* One in this many packets is looked up although its backend is known. This refreshes the packet's flow, and finds
 * flows that began on another balancer. */
#define DSR_SAMPLE_STREAM 128
#define DSR_SAMPLE_DATAGRAM 8 /* more often, because no flag marks the first datagram of a flow */

static __always_inline int dsr_sampled(const struct pkt *p)
{
	return p->sampled || bpf_get_prandom_u32() % (pkt_is_stream(p) ? DSR_SAMPLE_STREAM : DSR_SAMPLE_DATAGRAM) == 0;
}

/* decide_dsr_by_hash is for frontends where the hash determines the slot, and so the backend while the slot keeps it.
 * No flow is looked up, and a SYN writes only its flow's pending bit. When the client continues, the flow's entry is
 * written, which is needed once the slot gets another backend. Within a second of such a change, a pending flow without
 * an entry began before the change and has the previous backend. Later, the bit more likely belongs to another flow
 * with the same hash. Then this flow comes from another balancer, where it may have begun after the change. */
static __always_inline struct flow *decide_dsr_by_hash(const struct pkt *p, struct verdict *v,
						       const struct frontend *fe)
{
	__u32 h = fe->algorithm == ALGORITHM_FLOW_HASH ? v->hash : flow_hash(&p->key, fe->algorithm);
	__u32 slot = table_slot(&fe->table, table_index(&fe->table, h));
	__u64 bit, *word = dsr_pending_bit(v->hash, &bit);
	int first = pkt_is_stream(p) && pkt_opens_flow(p), kept = !(slot & SLOT_CHANGED), sampled = 0;
	enum commit c = COMMIT_NONE;

	v->dsr_pending = word && *word & bit;
	if (first) {
		c = COMMIT_DSR_MARK;
	} else if (!pkt_without_l4(p)) {
		sampled = v->dsr_pending || (pkt_is_stream(p) && p->flags & (TCP_FIN | TCP_RST)) || dsr_sampled(p);
		c = v->dsr_pending ? COMMIT_DSR_STORE : sampled && !table_is_new(fe) ? COMMIT_DSR_MARK : COMMIT_NONE;
	}
	if (sampled || !kept) {
		struct dsr_flow *f = dsr_find(&p->key);

		if (f && dsr_valid(p, f, fe))
			return decide_dsr_known(p, v, f);
	}
	if (p->flags & (TCP_FIN | TCP_RST))
		c = COMMIT_NONE;
	if (!frontend_allows(fe, &p->key.t.src))
		return verdict_set(v, ACTION_DROP, REASON_NOT_ALLOWED);
	if (slot_backend(slot) == NO_BACKEND)
		return verdict_refuse(p, v, REASON_NO_BACKEND);
	if (first && !kept)
		c = COMMIT_DSR_OPEN; /* removes the entry of an ended flow, which may have another backend */
	v->backend = !first && !kept && v->dsr_pending && table_is_new(fe) ? table_before(fe, &p->key, h) : NO_BACKEND;
	if (v->backend == NO_BACKEND)
		v->backend = slot_backend(slot);
	return dsr_forward(p, v, fe->method, c);
}

/* decide_dsr_by_flow is for frontends whose backend the hash does not determine, so each packet's flow is looked up. */
static __always_inline struct flow *decide_dsr_by_flow(const struct pkt *p, struct verdict *v,
						       const struct frontend *fe)
{
	struct dsr_flow *f = dsr_find(&p->key);

	if (f && dsr_valid(p, f, fe))
		return decide_dsr_known(p, v, f);
	if (!pkt_opens_flow(p))
		return verdict_refuse(p, v, REASON_NO_FLOW);
	if (!frontend_allows(fe, &p->key.t.src))
		return verdict_set(v, ACTION_DROP, REASON_NOT_ALLOWED);
	if (!backend_select(p, v, fe))
		return verdict_refuse(p, v, REASON_NO_BACKEND);
	return dsr_forward(p, v, fe->method, COMMIT_DSR_OPEN);
}

static __always_inline struct flow *decide_dsr(const struct pkt *p, struct verdict *v, const struct frontend *fe)
{
	return frontend_by_hash(fe) ? decide_dsr_by_hash(p, v, fe) : decide_dsr_by_flow(p, v, fe);
}

/* decide_tunnel handles packets of the tunnels themselves, and reports whether this is one. */
static __always_inline int decide_tunnel(const struct pkt *p, struct verdict *v)
{
	if (pmtu_is_report(p)) {
		verdict_set(v, ACTION_PASS, REASON_PMTU_LEARNED);
		v->commit = COMMIT_PMTU;
		return 1;
	}
	if (!tunnel_decap || p->fragment || p->icmp_error || p->key.proto != IPPROTO_UDP ||
	    p->key.t.dport != bpf_htons(tunnel_port) || !bpf_map_lookup_elem(&sy_local_addrs, &p->key.t.dst))
		return 0;
	struct allow_key k = { .prefix = 32 + 128, .source = p->key.t.src };

	if (bpf_map_lookup_elem(&sy_tunnel_src, &k))
		verdict_set(v, ACTION_DECAP, REASON_DECAPSULATED);
	else
		verdict_set(v, ACTION_DROP, REASON_UNKNOWN_TUNNEL_SOURCE);
	return 1;
}
