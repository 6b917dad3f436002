/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/* tc: packets may be large (GSO) and their checksum may still be missing (CHECKSUM_PARTIAL), so sums are changed by
 * helpers that know; a next hop that is not resolved is resolved by the kernel. */
#pragma once
#include "answer.h"
#include "commit.h"
#include "route.h"

/* What a program goes on with, when a packet has come out of its tunnel. */
#define NEXT_INSIDE 0

struct {
	__uint(type, BPF_MAP_TYPE_PROG_ARRAY);
	__uint(key_size, sizeof(__u32));
	__uint(value_size, sizeof(__u32));
	__uint(max_entries, 1);
} next SEC(".maps");

static __always_inline int tc_rewrite_sum(struct __sk_buff *skb, const struct pkt *p, const struct tuple *t)
{
	__u64 udp = p->key.proto == IPPROTO_UDP ? BPF_F_MARK_MANGLED_0 : 0;
	__u32 off = csum_offset(p);

	return !bpf_l4_csum_replace(skb, off, 0, addresses_diff(&p->key.t, t), BPF_F_PSEUDO_HDR | udp) &&
	       !bpf_l4_csum_replace(skb, off, 0, ports_diff(&p->key.t, t), udp);
}

static __always_inline int tc_rewrite(struct __sk_buff *skb, const struct pkt *p, const struct tuple *t)
{
	int summed = !p->error && p->fragment != LATER && p->key.proto != IPPROTO_SCTP;

	if (summed && !tc_rewrite_sum(skb, p, t))
		return 0;
	void *data = (void *)(long)skb->data, *end = (void *)(long)skb->data_end;

	if (p->error)
		return rewrite_error(data, end, p, t);
	if (summed && !rewrite_ports(data, end, p, t))
		return 0;
	if (p->fragment != LATER && p->key.proto == IPPROTO_SCTP && !rewrite_sctp(data, end, p, t))
		return 0;
	return rewrite_l3(data, end, p, t);
}

/* unfinished reports whether the kernel will compute the transport checksum when the packet leaves: a change that is
 * not of the pseudo header then leaves the field alone. Only senders on this very machine make such packets. */
static __always_inline int unfinished(struct __sk_buff *skb, const struct pkt *p)
{
	__u32 off = csum_offset(p);
	__u16 before = 0, after = 0;

	bpf_skb_load_bytes(skb, off, &before, sizeof(before));
	bpf_l4_csum_replace(skb, off, 0, bpf_htons(1), 2);
	bpf_skb_load_bytes(skb, off, &after, sizeof(after));
	bpf_skb_store_bytes(skb, off, &before, sizeof(before), 0);
	return before == after;
}

/* tc_resize makes the frame so long. It is cut at its end; or, when it came out of a tunnel and the kernel takes the transport
 * header to be where it no longer is, behind the IP header: what is there is written anew anyhow. */
static __always_inline int tc_resize(struct __sk_buff *skb, __u32 size)
{
	int more = (int)size - (int)skb->len;

	if (!bpf_skb_change_tail(skb, size, 0))
		return 1;
	return !bpf_skb_adjust_room(skb, more, BPF_ADJ_ROOM_NET, BPF_F_ADJ_ROOM_FIXED_GSO);
}

static __always_inline int tc_reset(struct __sk_buff *skb, const struct pkt *p)
{
	struct tcphdr tcp = reset_of(p);
	__u32 sum = pseudo_sum(p, sizeof(tcp), IPPROTO_TCP);

	if (unfinished(skb, p))
		tcp.csum = fold(sum); /* the kernel adds the rest and complements */
	else
		tcp.csum = ~fold(bpf_csum_diff(0, 0, (__be32 *)&tcp, sizeof(tcp), sum));
	if (!tc_resize(skb, p->l4 + sizeof(tcp)) || bpf_skb_store_bytes(skb, p->l4, &tcp, sizeof(tcp), 0))
		return 0;
	return turn_around((void *)(long)skb->data, (void *)(long)skb->data_end, p, sizeof(tcp), IPPROTO_TCP);
}

/* ICMP errors about a packet with an unfinished checksum are right as long as nobody finishes it: hosts on this machine take
 * them as they are, a network card might spoil them. To send none would be no better. */
static __always_inline int tc_error4(struct __sk_buff *skb, const struct pkt *p, const struct verdict *v)
{
	struct error4 e = { .icmp = error_of(p, v) };

	if (p->l4 != p->l3 + sizeof(e.ip) || bpf_skb_load_bytes(skb, p->l3, &e.ip, sizeof(e.ip) + QUOTE))
		return 0;
	e.icmp.csum = ~fold(bpf_csum_diff(0, 0, (__be32 *)&e, sizeof(e), 0));
	if (!tc_resize(skb, p->l4 + sizeof(e)) || bpf_skb_store_bytes(skb, p->l4, &e, sizeof(e), 0))
		return 0;
	return turn_around((void *)(long)skb->data, (void *)(long)skb->data_end, p, sizeof(e), IPPROTO_ICMP);
}

static __always_inline int tc_error6(struct __sk_buff *skb, const struct pkt *p, const struct verdict *v, const __u32 quote)
{
	struct error6 e = { .icmp = error_of(p, v) };
	const __u32 size = sizeof(e) - QUOTE_LONG + quote;

	if (bpf_skb_load_bytes(skb, p->l3, &e.ip, sizeof(e.ip) + quote))
		return 0;
	e.icmp.csum = ~fold(bpf_csum_diff(0, 0, (__be32 *)&e, size, pseudo_sum(p, size, IPPROTO_ICMPV6)));
	if (!tc_resize(skb, p->l4 + size) || bpf_skb_store_bytes(skb, p->l4, &e, size, 0))
		return 0;
	return turn_around((void *)(long)skb->data, (void *)(long)skb->data_end, p, size, IPPROTO_ICMPV6);
}

/* tc_room makes room before the IP header. A packet that came through a tunnel may still be known to the kernel as one that is
 * in a tunnel (over veth it is the sender's own): then it is told once. */
static __always_inline int tc_room(struct __sk_buff *skb, __u32 size, __u64 encap)
{
	long err = bpf_skb_adjust_room(skb, size, BPF_ADJ_ROOM_MAC, BPF_F_ADJ_ROOM_FIXED_GSO | encap);

	if (err == -EALREADY)
		err = bpf_skb_adjust_room(skb, size, BPF_ADJ_ROOM_MAC, BPF_F_ADJ_ROOM_FIXED_GSO);
	return !err;
}

/* tc_push puts size bytes before the IP header. Parts of a GSO packet keep their size: who sends them was told what fits. */
static __always_inline int tc_push(struct __sk_buff *skb, const struct pkt *p, const struct verdict *v, const void *outer, __u32 size)
{
	int v4 = is_v4(&v->t.dst);
	__u64 flags = v4 ? BPF_F_ADJ_ROOM_ENCAP_L3_IPV4 : BPF_F_ADJ_ROOM_ENCAP_L3_IPV6;
	__be16 type = v4 ? bpf_htons(ETH_P_IP) : bpf_htons(ETH_P_IPV6);

	if (v->method == METHOD_GUE)
		flags |= BPF_F_ADJ_ROOM_ENCAP_L4_UDP;
	return tc_room(skb, size, flags) && !bpf_skb_store_bytes(skb, p->l3, outer, size, 0) &&
	       !bpf_skb_store_bytes(skb, p->l3 - sizeof(type), &type, sizeof(type), 0);
}

static __always_inline int tc_encap(struct __sk_buff *skb, const struct pkt *p, const struct verdict *v)
{
	if (is_v4(&v->t.dst)) {
		struct outer4 o;

		outer4(p, v, &o);
		if (v->method == METHOD_IPIP)
			return tc_push(skb, p, v, &o, sizeof(o.ip));
		if (has_chain(v))
			return tc_push(skb, p, v, &o, sizeof(o));
		return tc_push(skb, p, v, &o, sizeof(o) - sizeof(o.chain));
	}
	struct outer6 o;

	outer6(p, v, &o);
	if (v->method == METHOD_IPIP)
		return tc_push(skb, p, v, &o, sizeof(o.ip));
	if (has_chain(v))
		return tc_push(skb, p, v, &o, sizeof(o));
	return tc_push(skb, p, v, &o, sizeof(o) - sizeof(o.chain));
}

/* tc_decap takes a packet out of its tunnel: n bytes less, and the frame is of that type. Others of the same connection may
 * have as many as reserve in their tunnels. */
__noinline int tc_decap(struct __sk_buff *skb, __u32 n, __u32 reserve, __u32 ethertype)
{
	__u64 flags = BPF_F_ADJ_ROOM_FIXED_GSO;
	__be16 type = ethertype;
	struct work *w = work();

	if (!w)
		return 0;
	const struct pkt *p = &w->p;


	if (type != skb->protocol) /* Linux 6.3; others have tunnels of one family */
		flags |= type == bpf_htons(ETH_P_IP) ? ADJ_ROOM_DECAP_IPV4 : ADJ_ROOM_DECAP_IPV6;
	if (bpf_skb_adjust_room(skb, -(int)(n & 1023), BPF_ADJ_ROOM_MAC, flags) ||
	    bpf_skb_store_bytes(skb, p->l3 - sizeof(type), &type, sizeof(type), 0))
		return 0;
	struct pkt inner = { .len = skb->len };

	if (parse((void *)(long)skb->data, (void *)(long)skb->data_end, &inner) == REASON_NONE)
		note_tunnelled(&inner.key.t.dst, reserve);
	return 1;
}

/* tc_neighbour sends a packet whose next hop the kernel has yet to find: with dsr that is the server, else it follows from the
 * packet. */
static __always_inline int tc_neighbour(const struct verdict *v, const struct bpf_fib_lookup *fib)
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

/* tc_carry makes the packet what it is to be on its way. */
__noinline int tc_carry(struct __sk_buff *skb)
{
	struct work *w = work();

	if (!w)
		return 0;
	const struct pkt *p = &w->p;
	const struct verdict *v = &w->v;

	if (v->method == METHOD_NAT)
		return tc_rewrite(skb, p, &v->t);
	if (!one_hop_less((void *)(long)skb->data, (void *)(long)skb->data_end, p))
		return 0;
	return v->method == METHOD_DSR || tc_encap(skb, p, v);
}

/* tc_answer makes the packet the answer to it. */
__noinline int tc_answer(struct __sk_buff *skb)
{
	struct work *w = work();

	if (!w)
		return 0;
	struct pkt *p = &w->p;

	switch (w->v.action) {
	case ACTION_ECHO:
		return echo((void *)(long)skb->data, (void *)(long)skb->data_end, p);
	case ACTION_RESET:
		return tc_reset(skb, p);
	case ACTION_REFUSE:
	case ACTION_TOO_BIG:
		if (!p->v6)
			return tc_error4(skb, p, &w->v);
		if (drop_extensions(p) == QUOTE)
			return tc_error6(skb, p, &w->v, QUOTE);
		return tc_error6(skb, p, &w->v, QUOTE_LONG);
	default:
		return 0;
	}
}

static __always_inline int tc_lost(void)
{
	lost();
	return TC_ACT_SHOT;
}

/* tc_deliver leaves a packet of a backend on this machine, or to one, to the stack, with its new addresses. */
static __always_inline int tc_deliver(struct __sk_buff *skb, struct work *w)
{
	w->p.same_hops = 1;
	return tc_carry(skb) ? TC_ACT_UNSPEC : tc_lost();
}

static __always_inline int tc_forward(struct __sk_buff *skb, const struct verdict *v, const struct bpf_fib_lookup *fib, enum route r)
{
	if (!tc_carry(skb))
		return tc_lost();
	if (r == ROUTE_NO_NEIGHBOUR)
		return tc_neighbour(v, fib);

	struct ethhdr *eth = (void *)(long)skb->data;

	if ((void *)(eth + 1) > (void *)(long)skb->data_end)
		return TC_ACT_SHOT;
	__builtin_memcpy(eth->dst, fib->dmac, ETH_ALEN);
	__builtin_memcpy(eth->src, fib->smac, ETH_ALEN);
	return bpf_redirect(fib->ifindex, 0);
}

/* part_len is how long the parts are in which a packet goes over the wire, from the IP header on. */
static __always_inline __u32 part_len(struct __sk_buff *skb, const struct pkt *p)
{
	if (!skb->gso_size)
		return p->l3len;
	if (p->key.proto == IPPROTO_TCP)
		return p->l3len - p->segment + skb->gso_size;
	return p->l4 - p->l3 + sizeof(struct udphdr) + skb->gso_size;
}

/* tc_inside takes a packet that is for a VIP out of its tunnel, and goes on with it. */
static __always_inline int tc_inside(struct __sk_buff *skb, struct work *w, __u32 n, __be16 type)
{
	read_inside((void *)(long)skb->data, (void *)(long)skb->data_end, &w->p, &w->in);
	if (tc_decap(skb, n, with_chain(&w->p, &w->in, n), type))
		bpf_tail_call(skb, &next, NEXT_INSIDE);
	return tc_lost();
}

/* tc_return sends an answer to where the packet came from. Out of a tunnel that is not who sent the frame. */
static __always_inline int tc_return(struct __sk_buff *skb, const struct inside *in)
{
	return in ? bpf_redirect_neigh(skb->ifindex, 0, 0, 0) : bpf_redirect(skb->ifindex, 0);
}

static __always_inline int act_tc(struct __sk_buff *skb, struct work *w, struct flow *f, const struct inside *in)
{
	const struct pkt *p = &w->p;
	struct verdict *v = &w->v;
	enum route r = ROUTE_NONE;
	__be16 type = 0;
	__u32 n = 0;

	/* The kernel takes one tag off before we see it; around a second one it makes no room. */
	if (p->l3 != sizeof(struct ethhdr) && (v->action == ACTION_DECAP || (v->action == ACTION_FORWARD && v->method >= METHOD_IPIP)))
		no_route(v, REASON_TAGS);
	if (v->action == ACTION_FORWARD && v->here)
		r = ROUTE_OK;
	else if (v->action == ACTION_FORWARD)
		r = route(skb, skb->ifindex, part_len(skb, p), p, v, &w->fib);
	if (r != ROUTE_NONE || v->commit == COMMIT_PATH)
		commit(f);
	if (v->action == ACTION_DECAP)
		n = tunnel_headers((void *)(long)skb->data, (void *)(long)skb->data_end, p, v, &type);
	limit_answer(v);
	if (v->reason != REASON_NOT_OURS)
		count(p, v);
	switch (v->action) {
	case ACTION_FORWARD:
		return v->here ? tc_deliver(skb, w) : tc_forward(skb, v, &w->fib, r);
	case ACTION_DECAP:
		if (delivers && v->here)
			return tc_inside(skb, w, n, type);
		return tc_decap(skb, n, n, type) ? TC_ACT_UNSPEC : tc_lost();
	case ACTION_PASS:
		return TC_ACT_UNSPEC; /* whatever else is on this interface goes on */
	case ACTION_DROP:
		return TC_ACT_SHOT;
	default:
		return tc_answer(skb) ? tc_return(skb, in) : tc_lost();
	}
}
