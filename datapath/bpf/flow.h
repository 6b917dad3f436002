/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/* The NAT flow tables. A flow has one entry for each direction. Once the client of a TCP or SCTP flow is confirmed,
 * both are in sy_stream_*. Before that, the server's entry is in sy_halfopen_servers. The client's entry is in
 * sy_halfopen_clients if the flow hash does not determine the source port. Moving a flow writes the new entries before
 * deleting the old ones, so a claimed source port is always in at least one table. Both entries of a UDP flow are in
 * sy_udp_*. Direct-return flows are in dsr.h. */
#pragma once
#include "clock.h"
#include "config.h"
#include "maps.h"
#include "parse.h"

static __always_inline int addr_is_zero(const struct addr *a)
{
	return !(a->w[0] | a->w[1] | a->w[2] | a->w[3]);
}

/* flow_figures returns the figures of the entry that begins with f. */
static __always_inline struct flow_figures *flow_figures(struct flow *f)
{
	return &((struct flow_side *)f)->figures;
}

/* pkt_is_stream reports whether the protocol marks the start and end of a flow, as TCP and SCTP do. */
static __always_inline int pkt_is_stream(const struct pkt *p)
{
	return p->key.proto != IPPROTO_UDP;
}

/* pkt_without_l4 reports whether a packet has no transport header of its own, as a later fragment or ICMP error. */
static __always_inline int pkt_without_l4(const struct pkt *p)
{
	return p->icmp_error || p->fragment == FRAG_LATER;
}

static __always_inline int pkt_opens_flow(const struct pkt *p)
{
	return !pkt_without_l4(p) && (!pkt_is_stream(p) || (p->flags & (TCP_SYN | TCP_ACK | TCP_RST)) == TCP_SYN);
}

/* server_id returns the field of a server_key for the id of a server's address. */
static __always_inline __u32 server_id(__u32 id, __u8 proto)
{
	return id << 8 | proto;
}

static __always_inline void flow_set_client(struct client_key *k, const struct pkt *p, __u32 frontend)
{
	k->client = p->key.t.src;
	k->frontend = frontend;
	k->sport = p->key.t.sport;
	k->dport = p->key.t.dport;
}

static __always_inline int client_key_equal(const struct client_key *a, const struct client_key *b)
{
	return a->sport == b->sport && a->dport == b->dport && a->frontend == b->frontend &&
	       addr_equal(a->client.w, b->client.w);
}

static __always_inline struct client_flow *flow_find_client(const struct client_key *k, int stream)
{
	return stream ? bpf_map_lookup_elem(&sy_stream_clients, k) : bpf_map_lookup_elem(&sy_udp_clients, k);
}

static __always_inline struct server_flow *flow_find_server(const struct server_key *k, int stream)
{
	return stream ? bpf_map_lookup_elem(&sy_stream_servers, k) : bpf_map_lookup_elem(&sy_udp_servers, k);
}

/* backend_generation reads a backend's generation once, because flow_ended compares it and the flow's entry then stores
 * it. */
static __always_inline __u32 backend_generation(const struct backend *b)
{
	return *(const volatile __u32 *)&b->generation;
}

/* flow_ended_before is the rest of flow_ended: the generations also differ if only another frontend's flows ended. */
__noinline int flow_ended_before(__u32 frontend, __u32 backend, __u32 generation)
{
	struct member_key k = { .frontend = frontend, .backend = backend };
	__u32 *first = bpf_map_lookup_elem(&sy_ended, &k);

	return first && (__s32)(generation - *first) < 0;
}

/* flow_ended reports whether a flow has ended because its backend went down, given the flow's generation and the
 * backend's. The agent adds an entry to sy_ended and then changes the backend's generation. This ends all of a
 * frontend's flows to the backend simultaneously, however many there are. */
static __always_inline int flow_ended(__u32 frontend, __u32 backend, __u32 generation, __u32 present)
{
	return generation != present && flow_ended_before(frontend, backend, generation);
}

/* flow_server_ended is flow_ended, given the server's entry. */
static __always_inline int flow_server_ended(const struct server_flow *s)
{
	struct backend *b = backend_get(s->backend);

	return b && flow_ended(s->client.frontend, s->backend, s->f.generation, backend_generation(b));
}

static __always_inline int flow_idle(const struct flow *f, __u32 now, __u64 timeout)
{
	return flow_elapsed(f->seen, now) > (__u32)(timeout >> FLOW_CLOCK_SHIFT);
}

/* flow_side_expired reports whether one side of a flow has been idle for longer than its timeout. */
static __always_inline int flow_side_expired(const struct flow *f, int stream, __u32 now)
{
	__u64 t = f->state == FLOW_CLOSED			      ? timeout_closed :
		  f->state == FLOW_CLOSING || f->doubt == DOUBT_RESET ? timeout_closing :
		  f->state == FLOW_HALF_OPEN			      ? timeout_half_open :
		  stream					      ? timeout_established :
									timeout_udp;

	return flow_idle(f, now, t);
}

/* flow_in_time_wait reports whether the server keeps a connection in TIME_WAIT, given the server's entry. */
static __always_inline int flow_in_time_wait(const struct flow *f)
{
	__u8 fin = flow_figures((struct flow *)f)->fin;

	return f->state == FLOW_CLOSED && (fin == FIN_FIRST || fin == FIN_ACKNOWLEDGED);
}

/* flow_server_expired reports whether a flow has expired or ended, given its server's entry. A UDP flow has expired
 * when both sides are idle. A TCP or SCTP flow has expired when the server is, because a server that has the connection
 * acknowledges everything its client sends, including keepalives. So a client cannot hold the source port of a
 * connection that its server has lost. */
static __always_inline int flow_server_expired(const struct server_flow *s, int stream, __u32 now)
{
	struct client_flow *c;

	if (flow_server_ended(s))
		return 1;
	if (flow_in_time_wait(&s->f))
		return flow_idle(&s->f, now, timeout_time_wait);
	if (!flow_side_expired(&s->f, stream, now))
		return 0;
	if (stream)
		return 1;
	c = flow_find_client(&s->client, stream);
	return !c || c->backend != s->backend || flow_side_expired(&c->f, stream, now);
}

/* The agent counts as away if it has not written for this long. It writes at least every 5 s. */
#define COLLECTOR_AWAY (15 * SECOND)

static __always_inline int collector_is_away(const struct collector *c, __u32 now)
{
	return flow_elapsed(c->seen, now) > (__u32)(COLLECTOR_AWAY >> FLOW_CLOCK_SHIFT);
}

/* flows_unattended reports whether no agent is running that removes flows. */
static __always_inline int flows_unattended(int stream, __u32 now)
{
	__u32 i = stream;
	struct collector *c = bpf_map_lookup_elem(&sy_collector, &i);

	return c && collector_is_away(c, now);
}

/* share_is_full reports whether a frontend has at least as many entries of a table as are free. shares holds the number
 * of entries by frontend id, and the total (SHARE_ALL). */
static __always_inline int share_is_full(void *shares, __u32 frontend, __u32 entries)
{
	__u32 all = SHARE_ALL, *n = bpf_map_lookup_elem(shares, &frontend), *sum = bpf_map_lookup_elem(shares, &all);

	return n && sum && *n && *n + *sum >= entries;
}

/* share_add changes the number of entries of a frontend, and the total, by n. */
static __always_inline void share_add(void *shares, __u32 frontend, int n)
{
	__u32 key = frontend, *count = bpf_map_lookup_elem(shares, &key);

	if (count && (n > 0 || *count > 0))
		__sync_fetch_and_add(count, n);
	key = SHARE_ALL;
	count = bpf_map_lookup_elem(shares, &key);
	if (count && (n > 0 || *count > 0))
		__sync_fetch_and_add(count, n);
}

/* frag_join sets the ports of a later fragment to the first fragment's. */
static __always_inline void frag_join(struct pkt *p)
{
	struct fragment_key k = { .src = p->key.t.src, .dst = p->key.t.dst, .id = p->frag_id, .proto = p->key.proto };
	struct fragment *f;

	if (p->fragment != FRAG_LATER)
		return;
	f = bpf_map_lookup_elem(&sy_frags, &k);
	if (!f)
		return;
	p->key.t.sport = f->sport;
	p->key.t.dport = f->dport;
}
