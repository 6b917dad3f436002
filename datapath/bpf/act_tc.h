/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/* The tc hook. A packet may be a GSO packet and its checksum may be incomplete (CHECKSUM_PARTIAL), so checksums
 * are changed by helpers that handle both. The kernel resolves a next hop without a neighbour entry. */
#pragma once
#include "answer.h"
#include "commit.h"
#include "route.h"

/* Index of the program that handles a packet after its tunnel headers were removed. */
#define PROG_TC_DECAP 0

struct {
	__uint(type, BPF_MAP_TYPE_PROG_ARRAY);
	__uint(key_size, sizeof(__u32));
	__uint(value_size, sizeof(__u32));
	__uint(max_entries, 1);
} sy_progs SEC(".maps");

static __always_inline int tc_rewrite_csum(struct __sk_buff *skb, const struct pkt *p, const struct tuple *t)
{
	__u64 udp = p->key.proto == IPPROTO_UDP ? BPF_F_MARK_MANGLED_0 : 0;
	__u32 off = csum_offset(p);

	return !bpf_l4_csum_replace(skb, off, 0, csum_addrs_diff(&p->key.t, t), BPF_F_PSEUDO_HDR | udp) &&
	       !bpf_l4_csum_replace(skb, off, 0, csum_ports_diff(&p->key.t, t), udp);
}

static __always_inline int tc_rewrite(struct __sk_buff *skb, const struct pkt *p, const struct tuple *t)
{
	int summed = !p->icmp_error && p->fragment != FRAG_LATER && p->key.proto != IPPROTO_SCTP;

	if (summed && !tc_rewrite_csum(skb, p, t))
		return 0;
	void *data = (void *)(long)skb->data, *end = (void *)(long)skb->data_end;

	if (p->icmp_error)
		return rewrite_icmp_error(data, end, p, t);
	if (summed && !rewrite_ports(data, end, p, t))
		return 0;
	if (p->fragment != FRAG_LATER && p->key.proto == IPPROTO_SCTP && !rewrite_sctp(data, end, p, t))
		return 0;
	return rewrite_l3(data, end, p, t);
}

/* tc_csum_partial reports whether the kernel computes the transport checksum on transmit (CHECKSUM_PARTIAL). A
 * change outside the pseudo header then leaves the field as it is. Only senders on this host produce such packets. */
static __always_inline int tc_csum_partial(struct __sk_buff *skb, const struct pkt *p)
{
	__u32 off = csum_offset(p);
	__u16 before = 0, after = 0;

	bpf_skb_load_bytes(skb, off, &before, sizeof(before));
	bpf_l4_csum_replace(skb, off, 0, bpf_htons(1), 2);
	bpf_skb_load_bytes(skb, off, &after, sizeof(after));
	bpf_skb_store_bytes(skb, off, &before, sizeof(before), 0);
	return before == after;
}

/* tc_resize sets the length of the frame. It cuts at the end. That fails for a decapsulated packet whose transport
 * header offset in the skb is stale; then it cuts behind the IP header, where the caller writes anew in any case. */
static __always_inline int tc_resize(struct __sk_buff *skb, __u32 size)
{
	int more = (int)size - (int)skb->len;

	if (!bpf_skb_change_tail(skb, size, 0))
		return 1;
	return !bpf_skb_adjust_room(skb, more, BPF_ADJ_ROOM_NET, BPF_F_ADJ_ROOM_FIXED_GSO);
}

static __always_inline int tc_reset(struct __sk_buff *skb, const struct pkt *p)
{
	struct tcphdr tcp = tcp_reset_header(p);
	__u32 sum = csum_pseudo(p, sizeof(tcp), IPPROTO_TCP);

	if (tc_csum_partial(skb, p))
		tcp.csum = csum_fold(sum); /* the kernel adds the rest and complements */
	else
		tcp.csum = ~csum_fold(bpf_csum_diff(0, 0, (__be32 *)&tcp, sizeof(tcp), sum));
	if (!tc_resize(skb, p->l4 + sizeof(tcp)) || bpf_skb_store_bytes(skb, p->l4, &tcp, sizeof(tcp), 0))
		return 0;
	return rewrite_to_answer((void *)(long)skb->data, (void *)(long)skb->data_end, p, sizeof(tcp), IPPROTO_TCP);
}

/* An ICMP error that quotes a packet with an incomplete checksum is correct as long as no device completes the
 * sum: receivers on this host accept it, a network card could corrupt it. Sending no error is not better. */
static __always_inline int tc_error4(struct __sk_buff *skb, const struct pkt *p, const struct verdict *v)
{
	struct error4 e = { .icmp = icmp_error_header(p, v) };

	if (p->l4 != p->l3 + sizeof(e.ip) || bpf_skb_load_bytes(skb, p->l3, &e.ip, sizeof(e.ip) + QUOTE))
		return 0;
	e.icmp.csum = ~csum_fold(bpf_csum_diff(0, 0, (__be32 *)&e, sizeof(e), 0));
	if (!tc_resize(skb, p->l4 + sizeof(e)) || bpf_skb_store_bytes(skb, p->l4, &e, sizeof(e), 0))
		return 0;
	return rewrite_to_answer((void *)(long)skb->data, (void *)(long)skb->data_end, p, sizeof(e), IPPROTO_ICMP);
}

static __always_inline int tc_error6(struct __sk_buff *skb, const struct pkt *p, const struct verdict *v,
				     const __u32 quote)
{
	struct error6 e = { .icmp = icmp_error_header(p, v) };
	const __u32 size = sizeof(e) - QUOTE_LONG + quote;

	if (bpf_skb_load_bytes(skb, p->l3, &e.ip, sizeof(e.ip) + quote))
		return 0;
	e.icmp.csum = ~csum_fold(bpf_csum_diff(0, 0, (__be32 *)&e, size, csum_pseudo(p, size, IPPROTO_ICMPV6)));
	if (!tc_resize(skb, p->l4 + size) || bpf_skb_store_bytes(skb, p->l4, &e, size, 0))
		return 0;
	return rewrite_to_answer((void *)(long)skb->data, (void *)(long)skb->data_end, p, size, IPPROTO_ICMPV6);
}

/* tc_make_room inserts room before the IP header. The skb of a decapsulated packet may still be marked as
 * encapsulated (on veth it is the sender's skb); the kernel then refuses a second mark with EALREADY, and the
 * first one stays. */
static __always_inline int tc_make_room(struct __sk_buff *skb, __u32 size, __u64 encap)
{
	long err = bpf_skb_adjust_room(skb, size, BPF_ADJ_ROOM_MAC, BPF_F_ADJ_ROOM_FIXED_GSO | encap);

	if (err == -EALREADY)
		err = bpf_skb_adjust_room(skb, size, BPF_ADJ_ROOM_MAC, BPF_F_ADJ_ROOM_FIXED_GSO);
	return !err;
}

/* tc_push inserts size bytes before the IP header. Segments of a GSO packet keep their size: the sender's MSS
 * accounts for the tunnel. */
static __always_inline int tc_push(struct __sk_buff *skb, const struct pkt *p, const struct verdict *v,
				   const void *outer, __u32 size)
{
	int v4 = addr_is_v4(&v->t.dst);
	__u64 flags = v4 ? BPF_F_ADJ_ROOM_ENCAP_L3_IPV4 : BPF_F_ADJ_ROOM_ENCAP_L3_IPV6;
	__be16 type = v4 ? bpf_htons(ETH_P_IP) : bpf_htons(ETH_P_IPV6);

	if (v->method == METHOD_GUE)
		flags |= BPF_F_ADJ_ROOM_ENCAP_L4_UDP;
	return tc_make_room(skb, size, flags) && !bpf_skb_store_bytes(skb, p->l3, outer, size, 0) &&
	       !bpf_skb_store_bytes(skb, p->l3 - sizeof(type), &type, sizeof(type), 0);
}

static __always_inline int tc_encap(struct __sk_buff *skb, const struct pkt *p, const struct verdict *v)
{
	if (addr_is_v4(&v->t.dst)) {
		struct outer4 o;

		encap_outer4(p, v, &o);
		if (v->method == METHOD_IPIP)
			return tc_push(skb, p, v, &o, sizeof(o.ip));
		if (encap_has_chain(v))
			return tc_push(skb, p, v, &o, sizeof(o));
		return tc_push(skb, p, v, &o, sizeof(o) - sizeof(o.chain));
	}
	struct outer6 o;

	encap_outer6(p, v, &o);
	if (v->method == METHOD_IPIP)
		return tc_push(skb, p, v, &o, sizeof(o.ip));
	if (encap_has_chain(v))
		return tc_push(skb, p, v, &o, sizeof(o));
	return tc_push(skb, p, v, &o, sizeof(o) - sizeof(o.chain));
}

/* tc_decap removes the outer headers (n bytes) and sets the ethertype. reserve is the largest overhead that other
 * packets of the same connection may have. */
__noinline int tc_decap(struct __sk_buff *skb, __u32 n, __u32 reserve, __u32 ethertype)
{
	__u64 flags = BPF_F_ADJ_ROOM_FIXED_GSO;
	__be16 type = ethertype;
	struct scratch *s = scratch_get();

	if (!s)
		return 0;
	const struct pkt *p = &s->p;

	if (type != skb->protocol) /* needs Linux 6.3; before, both headers must be of one family */
		flags |= type == bpf_htons(ETH_P_IP) ? ADJ_ROOM_DECAP_IPV4 : ADJ_ROOM_DECAP_IPV6;
	if (bpf_skb_adjust_room(skb, -(int)(n & 1023), BPF_ADJ_ROOM_MAC, flags) ||
	    bpf_skb_store_bytes(skb, p->l3 - sizeof(type), &type, sizeof(type), 0))
		return 0;
	struct pkt inner = { .len = skb->len };

	if (parse((void *)(long)skb->data, (void *)(long)skb->data_end, &inner) == REASON_NONE)
		decap_note_overhead(&inner.key.t.dst, reserve);
	return 1;
}

/* tc_redirect_neigh sends a packet whose next hop has no neighbour entry. With METHOD_DSR the next hop is the
 * server; otherwise the kernel takes it from the packet. */
static __always_inline int tc_redirect_neigh(const struct verdict *v, const struct bpf_fib_lookup *fib)
{
	struct bpf_redir_neigh hop = { .nh_family = fib->family };

	if (v->method != METHOD_DSR)
		return bpf_redirect_neigh(fib->ifindex, 0, 0, 0);
	if (fib->family == AF_INET)
		hop.ipv4_nh = fib->ipv4_dst;
	else
		__builtin_memcpy(hop.ipv6_nh, fib->ipv6_dst, sizeof(hop.ipv6_nh));
	return bpf_redirect_neigh(fib->ifindex, &hop, sizeof(hop), 0);
}

/* tc_transform rewrites or encapsulates the packet as the verdict says. */
__noinline int tc_transform(struct __sk_buff *skb)
{
	struct scratch *s = scratch_get();

	if (!s)
		return 0;
	const struct pkt *p = &s->p;
	const struct verdict *v = &s->v;

	if (v->method == METHOD_NAT)
		return tc_rewrite(skb, p, &v->t);
	if (!rewrite_ttl((void *)(long)skb->data, (void *)(long)skb->data_end, p))
		return 0;
	return v->method == METHOD_DSR || tc_encap(skb, p, v);
}

/* tc_answer turns the packet into the answer to it. */
__noinline int tc_answer(struct __sk_buff *skb)
{
	struct scratch *s = scratch_get();

	if (!s)
		return 0;
	struct pkt *p = &s->p;

	switch (s->v.action) {
	case ACTION_ECHO:
		return icmp_echo_reply((void *)(long)skb->data, (void *)(long)skb->data_end, p);
	case ACTION_RESET:
		return tc_reset(skb, p);
	case ACTION_REFUSE:
	case ACTION_TOO_BIG:
		if (!p->v6)
			return tc_error4(skb, p, &s->v);
		if (icmp_strip_extensions(p) == QUOTE)
			return tc_error6(skb, p, &s->v, QUOTE);
		return tc_error6(skb, p, &s->v, QUOTE_LONG);
	default:
		return 0;
	}
}

static __always_inline int tc_internal_error(void)
{
	verdict_internal_error();
	return TC_ACT_SHOT;
}

/* tc_deliver rewrites a packet from or to a backend on this node and passes it to the stack. */
static __always_inline int tc_deliver(struct __sk_buff *skb, struct scratch *s)
{
	s->p.keep_ttl = 1;
	return tc_transform(skb) ? TC_ACT_UNSPEC : tc_internal_error();
}

static __always_inline int tc_forward(struct __sk_buff *skb, const struct verdict *v, const struct bpf_fib_lookup *fib,
				      enum route r)
{
	if (!tc_transform(skb))
		return tc_internal_error();
	if (r == ROUTE_NO_NEIGHBOUR)
		return tc_redirect_neigh(v, fib);

	struct ethhdr *eth = (void *)(long)skb->data;

	if ((void *)(eth + 1) > (void *)(long)skb->data_end)
		return TC_ACT_SHOT;
	__builtin_memcpy(eth->dst, fib->dmac, ETH_ALEN);
	__builtin_memcpy(eth->src, fib->smac, ETH_ALEN);
	return bpf_redirect(fib->ifindex, 0);
}

/* tc_segment_len returns the length on the wire of one segment, from the IP header on. */
static __always_inline __u32 tc_segment_len(struct __sk_buff *skb, const struct pkt *p)
{
	if (!skb->gso_size)
		return p->l3len;
	if (p->key.proto == IPPROTO_TCP)
		return p->l3len - p->payload + skb->gso_size;
	return p->l4 - p->l3 + sizeof(struct udphdr) + skb->gso_size;
}

/* tc_decap_vip removes the tunnel headers of a packet for a VIP and continues in sy_tc_decap. */
static __always_inline int tc_decap_vip(struct __sk_buff *skb, struct scratch *s, __u32 n, __be16 type)
{
	decap_read_chain((void *)(long)skb->data, (void *)(long)skb->data_end, &s->p, &s->in);
	if (tc_decap(skb, n, decap_max_overhead(&s->p, &s->in, n), type))
		bpf_tail_call(skb, &sy_progs, PROG_TC_DECAP);
	return tc_internal_error();
}

/* tc_send_back sends an answer to the sender of the packet. A decapsulated packet has its sender behind a route,
 * not on the link. */
static __always_inline int tc_send_back(struct __sk_buff *skb, const struct decap_ctx *in)
{
	return in ? bpf_redirect_neigh(skb->ifindex, 0, 0, 0) : bpf_redirect(skb->ifindex, 0);
}

static __always_inline int act_tc(struct __sk_buff *skb, struct scratch *s, struct flow *f, const struct decap_ctx *in)
{
	const struct pkt *p = &s->p;
	struct verdict *v = &s->v;
	enum route r = ROUTE_NONE;
	__be16 type = 0;
	__u32 n = 0;

	/* The kernel strips one VLAN tag before tc. bpf_skb_adjust_room does not support a second one. */
	if (p->l3 != sizeof(struct ethhdr) &&
	    (v->action == ACTION_DECAP || (v->action == ACTION_FORWARD && v->method >= METHOD_IPIP)))
		route_drop(v, REASON_VLAN_STACKED);
	if (v->action == ACTION_FORWARD && v->local)
		r = ROUTE_OK;
	else if (v->action == ACTION_FORWARD)
		r = route_lookup(skb, skb->ifindex, tc_segment_len(skb, p), p, v, &s->fib);
	if (r != ROUTE_NONE || v->commit == COMMIT_PMTU)
		commit(f);
	if (v->action == ACTION_DECAP)
		n = decap_parse((void *)(long)skb->data, (void *)(long)skb->data_end, p, v, &type);
	icmp_ratelimit(v);
	if (v->reason != REASON_NOT_OURS)
		verdict_count(p, v);
	switch (v->action) {
	case ACTION_FORWARD:
		return v->local ? tc_deliver(skb, s) : tc_forward(skb, v, &s->fib, r);
	case ACTION_DECAP:
		if (local_delivery && v->local)
			return tc_decap_vip(skb, s, n, type);
		return tc_decap(skb, n, n, type) ? TC_ACT_UNSPEC : tc_internal_error();
	case ACTION_PASS:
		return TC_ACT_UNSPEC; /* other programs on this interface go on */
	case ACTION_DROP:
		return TC_ACT_SHOT;
	default:
		return tc_answer(skb) ? tc_send_back(skb, in) : tc_internal_error();
	}
}
