/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/* The shortest path through sy_xdp, for the most frequent packets: TCP and UDP without fragmentation, IP options or
 * VLAN tags. It handles packets that are not ours, whose backend follows from the hash alone, or that are in the middle
 * of a NAT flow. It does the work of the other steps in registers, because most of their cost is the memory that they
 * share. It changes nothing before it is certain, and leaves all other packets to the other steps. */
#pragma once
#include "act_xdp.h"

#ifndef TRACE_SHORTCUT /* trace.h */
#define TRACE_SHORTCUT(v, egress)
#endif

enum fast {
	FAST_NOT = -1, /* the other steps process the packet */
	FAST_SAMPLED = -2, /* the other steps process the packet and refresh its flow */
};

static __always_inline int fast_parse_ip(const void *l3, struct pkt *p, const int v6)
{
	const struct ip6hdr *ip6 = l3;
	const struct iphdr *ip = l3;

	if (v6) {
		__builtin_memcpy(&p->key.t.src, &ip6->src, sizeof(p->key.t.src));
		__builtin_memcpy(&p->key.t.dst, &ip6->dst, sizeof(p->key.t.dst));
		p->key.proto = ip6->next;
		p->ttl = ip6->hop_limit;
		p->tos = bpf_ntohl(ip6->ver_class_label) >> 20;
		p->l3len = bpf_ntohs(ip6->len) + sizeof(*ip6);
		p->dont_fragment = 1;
		return !addr_is_martian6(&p->key.t.src) && !addr_is_v4(&p->key.t.src) && !addr_is_v4(&p->key.t.dst);
	}
	p->key.t.src = addr_v4mapped(ip->src);
	p->key.t.dst = addr_v4mapped(ip->dst);
	p->key.proto = ip->proto;
	p->ttl = ip->ttl;
	p->tos = ip->tos;
	p->l3len = bpf_ntohs(ip->len);
	p->dont_fragment = (ip->frag & bpf_htons(IP_DF)) != 0;
	return ip->ver_ihl == 0x45 && !(ip->frag & bpf_htons(IP_MF | IP_OFFSET)) && !addr_is_martian4(ip->src);
}

static __always_inline int fast_parse(void *data, void *end, struct pkt *p, const int v6)
{
	const __u32 hlen = v6 ? sizeof(struct ip6hdr) : sizeof(struct iphdr);
	void *l3 = data + sizeof(struct ethhdr);
	struct udphdr *udp = l3 + hlen;
	struct tcphdr *tcp = l3 + hlen;

	if ((void *)(udp + 1) > end || !fast_parse_ip(l3, p, v6))
		return 0;
	p->l3 = sizeof(struct ethhdr);
	p->l4 = sizeof(struct ethhdr) + hlen;
	p->v6 = v6;
	p->key.t.sport = udp->sport;
	p->key.t.dport = udp->dport;
	if (p->key.proto == IPPROTO_UDP)
		return p->l3len >= hlen + sizeof(*udp);
	if (p->key.proto != IPPROTO_TCP || (void *)(tcp + 1) > end)
		return 0;
	__u32 tcp_len = (tcp->off >> 4) * 4;

	p->seq = bpf_ntohl(tcp->seq);
	p->ack = bpf_ntohl(tcp->ack);
	p->flags = tcp->flags;
	p->payload = p->l3len - hlen - tcp_len;
	return tcp_len >= sizeof(*tcp) && p->l3len >= hlen + tcp_len;
}

/* fast_address sets an address of a verdict, or fails if the address is not of the packet's family. */
static __always_inline int fast_address(struct addr *to, const struct addr *from, const int v6)
{
	if (addr_is_v4(from) == v6)
		return 0;
	*to = v6 ? *from : addr_v4mapped(from->w[3]);
	return 1;
}

static __always_inline int fast_encap(struct xdp_md *ctx, const struct pkt *p, const struct verdict *v, const int v6)
{
	struct outer4 o4;
	struct outer6 o6;

	if (!rewrite_ttl((void *)(long)ctx->data, (void *)(long)ctx->data_end, p))
		return 0;
	if (v->method == METHOD_DSR)
		return 1;
	return v6 ? act_encap6(ctx, HOOK_XDP, p, v, &o6) : act_encap4(ctx, HOOK_XDP, p, v, &o4);
}

/* fast_send sends the packet. f is the entry of a NAT flow, or NULL. */
static __always_inline int fast_send(struct xdp_md *ctx, const struct pkt *p, struct verdict *v, struct flow *f,
				     const int v6)
{
	struct bpf_fib_lookup fib;
	__u8 path = v->hash % NEXT_HOP_PATHS;
	struct next_hop *hop = next_hop_slot(v, path);
	__u32 len = p->l3len + encap_overhead(v), mtu = 0;

	if (p->ttl <= 1 || !xdp_is_addressed(ctx) || !route_fits_pmtu(p, v, len, &mtu) ||
	    !route_cached(hop, path, len, v, &fib) ||
	    !((fib.ifindex == ctx->ingress_ifindex && !no_xdp_tx) || v->to_uplink))
		return FAST_NOT;
	if (v->commit == COMMIT_DSR_MARK)
		dsr_set_pending(v, 1);
	if (f) {
		flow_count(p, v, f);
		nat_follow(p, v, f);
	}
	verdict_set(v, ACTION_FORWARD, REASON_FORWARDED);
	verdict_count(p, v);
	if (!(f ? act_rewrite(ctx, HOOK_XDP, p, &v->t) : fast_encap(ctx, p, v, v6))) {
		v->counted = 0;
		verdict_set(v, ACTION_DROP, REASON_INTERNAL_ERROR);
		verdict_count(p, v);
		return XDP_DROP;
	}
	TRACE_SHORTCUT(v, fib.ifindex);
	return xdp_send_to(ctx, &fib);
}

/* fast_by_hash is decide_dsr_by_hash and decide_spread for a slot that has always had one backend. */
static __always_inline int fast_by_hash(struct xdp_md *ctx, const struct pkt *p, struct verdict *v,
					const struct frontend *fe, const int v6)
{
	int chained = local_delivery && fe->chained, first = pkt_is_stream(p) && pkt_opens_flow(p);

	if (fe->algorithm != ALGORITHM_FLOW_HASH || fe->restricted || (!chained && fe->affinity))
		return FAST_NOT;
	/* As decide_source does. */
	if ((first || !pkt_is_stream(p)) && addr_kinds(&p->key.t.src) & (ADDR_VIP | ADDR_OWN))
		return FAST_NOT;
	__u32 word = table_slot(&fe->table, table_index(&fe->table, v->hash));

	/* NO_BACKEND needs no check, because backend_get does not find it. */
	if (word & SLOT_CHANGED)
		return FAST_NOT;
	struct backend *b = backend_get(word);

	if (!b || addr_is_zero(&b->snat[0]) || !fast_address(&v->t.dst, &b->addr, v6) ||
	    !fast_address(&v->t.src, &b->snat[0], v6))
		return FAST_NOT;
	if (chained && b->local)
		return XDP_TO_TC;
	if (!chained) {
		__u64 bit, *pending = dsr_pending_bit(v->hash, &bit);

		if (!pending || p->flags & (TCP_FIN | TCP_RST))
			return FAST_NOT;
		v->dsr_pending = (*pending & bit) != 0;
		if (first)
			v->commit = COMMIT_DSR_MARK;
		else if (v->dsr_pending)
			return FAST_NOT;
		else if (dsr_sampled(p))
			return FAST_SAMPLED;
	}
	v->backend = word;
	v->counted = 2;
	v->method = chained ? METHOD_GUE : fe->method;
	v->keyed = chained || b->keyed;
	tunnel_set_ports(v);
	return fast_send(ctx, p, v, 0, v6);
}

/* fast_in_flow reports whether a packet is TCP and changes only the sequence numbers and times of its flow. */
static __always_inline int fast_in_flow(const struct pkt *p)
{
	return p->key.proto == IPPROTO_TCP && (p->flags & (TCP_SYN | TCP_FIN | TCP_RST | TCP_ACK)) == TCP_ACK;
}

/* fast_client is decide_nat for a client's packet. */
static __always_inline int fast_client(struct xdp_md *ctx, const struct pkt *p, struct verdict *v, const int v6)
{
	struct client_key k;

	flow_set_client(&k, p, v->frontend);
	struct client_flow *c = bpf_map_lookup_elem(&sy_stream_clients, &k);

	v->now = flow_clock();
	if (!c || c->f.state == FLOW_CLOSED || c->f.doubt || flow_side_expired(&c->f, 1, v->now))
		return FAST_NOT;
	struct backend *b = backend_get(c->backend);

	if (!b || addr_is_zero(&b->addr) || !fast_address(&v->t.dst, &b->addr, v6) ||
	    !fast_address(&v->t.src, &c->source, v6))
		return FAST_NOT;
	v->generation = backend_generation(b);
	if (flow_ended(v->frontend, c->backend, c->f.generation, v->generation))
		return FAST_NOT;
	if (b->local)
		return XDP_TO_TC;
	v->t.sport = c->sport;
	v->t.dport = c->dport;
	v->backend = c->backend;
	v->counted = 2;
	v->method = METHOD_NAT;
	return fast_send(ctx, p, v, &c->f, v6);
}

/* fast_reply is decide_reply for a server's packet. */
static __always_inline int fast_reply(struct xdp_md *ctx, const struct pkt *p, struct verdict *v, const int v6)
{
	struct addr src = p->key.t.src;
	__u32 *id = bpf_map_lookup_elem(&sy_servers, &src), frontend;

	if (!id)
		return FAST_NOT;
	struct server_key k = { .to = p->key.t.dst,
				.server = server_id(*id, p->key.proto),
				.dport = p->key.t.dport,
				.sport = p->key.t.sport };
	struct server_flow *s = bpf_map_lookup_elem(&sy_stream_servers, &k);

	if (!s || s->f.state == FLOW_CLOSED)
		return FAST_NOT;
	frontend = s->client.frontend;
	struct addr *vip = bpf_map_lookup_elem(&sy_frontend_vips, &frontend);
	struct backend *b = backend_get(s->backend);

	if (!vip || !b || b->local || !fast_address(&v->t.src, vip, v6) ||
	    !fast_address(&v->t.dst, &s->client.client, v6))
		return FAST_NOT;
	v->generation = backend_generation(b);
	if (flow_ended(frontend, s->backend, s->f.generation, v->generation))
		return FAST_NOT;
	v->t.sport = s->client.dport;
	v->t.dport = s->client.sport;
	v->frontend = frontend;
	v->backend = s->backend;
	v->counted = 2;
	v->reply = 1;
	v->method = METHOD_NAT;
	v->now = flow_clock();
	v->hash = flow_hash(&p->key, ALGORITHM_FLOW_HASH);
	return fast_send(ctx, p, v, &s->f, v6);
}

static __always_inline int fast_packet(struct xdp_md *ctx, const int v6)
{
	struct pkt p = { .len = xdp_frags ? bpf_xdp_get_buff_len(ctx) : ctx->data_end - ctx->data };
	struct verdict v = {};

	if (xdp_has_frags(ctx, &p) || !fast_parse((void *)(long)ctx->data, (void *)(long)ctx->data_end, &p, v6))
		return FAST_NOT;
	__u8 to = addr_kinds(&p.key.t.dst);

	if (!(to & ADDR_VIP)) {
		if (to & ADDR_OWN && !snat_is_used(p.key.t.dport))
			return p.key.proto == IPPROTO_TCP ? XDP_TO_TC : FAST_NOT;
		if (!(addr_kinds(&p.key.t.src) & ADDR_BACKEND))
			return to & ADDR_OWN ? FAST_NOT : XDP_TO_TC;
		return fast_in_flow(&p) ? fast_reply(ctx, &p, &v, v6) : FAST_NOT;
	}
	struct frontend_key key = { .vip = p.key.t.dst, .port = p.key.t.dport, .proto = p.key.proto };
	struct frontend *fe = bpf_map_lookup_elem(&sy_frontends, &key);

	if (!fe)
		return FAST_NOT;
	if (local_delivery && fe->local)
		return XDP_TO_TC;
	v.frontend = fe->id;
	v.hash = flow_hash(&p.key, ALGORITHM_FLOW_HASH);
	if ((local_delivery && fe->chained) || fe->method != METHOD_NAT)
		return fast_by_hash(ctx, &p, &v, fe, v6);
	return fast_in_flow(&p) ? fast_client(ctx, &p, &v, v6) : FAST_NOT;
}

__noinline int fast_v4(struct xdp_md *ctx)
{
	return fast_packet(ctx, 0);
}

__noinline int fast_v6(struct xdp_md *ctx)
{
	return fast_packet(ctx, 1);
}

static __always_inline int fast_xdp(struct xdp_md *ctx)
{
	struct ethhdr *eth = (void *)(long)ctx->data;

	if ((void *)(eth + 1) > (void *)(long)ctx->data_end)
		return FAST_NOT;
	if (eth->proto == bpf_htons(ETH_P_IP))
		return fast_v4(ctx);
	return eth->proto == bpf_htons(ETH_P_IPV6) ? fast_v6(ctx) : FAST_NOT;
}
