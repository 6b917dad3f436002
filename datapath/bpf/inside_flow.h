/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/* Flows of the service proxy. Each has two entries, one per direction. */
#pragma once
#include "nat.h"
#include "inside_maps.h"

#define IN_UNANSWERED 5 /* seconds after which the source port of a connection without an answer may be used */
#define IN_TRIES 32 /* source ports to try if another flow uses the client's */

/* Source ports for flows that cannot keep the client's port: towards an endpoint that the same client reaches by
 * another flow, and for connections that this node sends on for other machines. By default neither sockets (from 32768)
 * nor node ports (from 30000) are among the latter. */
#define IN_OTHER_FIRST 61000
#define IN_OTHER_PORTS 4536
#define IN_MASKED_FIRST 20000
#define IN_MASKED_PORTS 10000

static __always_inline __u32 in_now(void)
{
	return bpf_ktime_get_coarse_ns() / SECOND;
}

static __always_inline struct tuple tuple_reverse(const struct tuple *t)
{
	return (struct tuple){ .src = t->dst, .dst = t->src, .sport = t->dport, .dport = t->sport };
}

/* tuple_set_reverse is tuple_reverse without a copy on the stack: Linux 6.1 allows a chain of calls 512 bytes. */
static __always_inline void tuple_set_reverse(struct tuple *to, const struct tuple *t)
{
	to->src = t->dst;
	to->dst = t->src;
	to->sport = t->dport;
	to->dport = t->sport;
}

static __always_inline int tuple_equal(const struct tuple *a, const struct tuple *b)
{
	return addr_equal(a->src.w, b->src.w) && addr_equal(a->dst.w, b->dst.w) && a->sport == b->sport &&
	       a->dport == b->dport;
}

/* in_other returns the other direction of the flow with an entry, or NULL if that refers to another flow by now. */
static __noinline struct in_flow *in_other(const struct tuple *key, __u8 place, const struct in_flow *f, __u8 proto)
{
	struct in_flow_key k = { .t = tuple_reverse(&f->to), .proto = proto, .place = f->other };
	struct in_flow *o = bpf_map_lookup_elem(&sy_in_flows, &k);

	if (!o || o->other != place)
		return 0;
	k.t = tuple_reverse(&o->to);
	return tuple_equal(&k.t, key) ? o : 0;
}

/* in_is_closed reports whether both sides have ended a flow, or one has reset it, so another one may replace it. */
static __always_inline int in_is_closed(const struct in_flow *a, const struct in_flow *b)
{
	return (a->flags | b->flags) & IN_RST || a->flags & b->flags & IN_FIN;
}

/* in_asks notes whether TCP must acknowledge a packet, and returns by how much that advances the sequence number. */
static __always_inline __u32 in_asks(struct in_flow *f, const struct pkt *p)
{
	__u32 length = p->payload + ((p->flags & TCP_SYN) != 0) + ((p->flags & TCP_FIN) != 0);
	__u8 asks = length != 0;

	if (f->asks != asks)
		f->asks = asks;
	return length;
}

/* in_touch notes a packet of a flow. A FIN or RST whose sequence number is far from the last one may be forged, and
 * changes nothing; the receiver judges it (RFC 5961). It writes only what changes, because another CPU may note a FIN
 * of the same side at the same time. */
static __always_inline void in_touch(struct in_flow *f, const struct pkt *p)
{
	if (p->icmp_error) /* not of this side: a router or this node may say that it does not answer */
		return;
	__u32 now = in_now();
	__u8 was = *(volatile __u8 *)&f->flags, flags = (was & ~IN_RST) | IN_SEEN;

	if (!pkt_is_stream(p) && was & IN_SEEN && f->seen != now)
		flags |= IN_CONFIRMED;
	if (f->seen != now)
		f->seen = now;
	if (!pkt_without_l4(p) && pkt_is_stream(p)) {
		if (!(was & IN_SEEN) && !(p->flags & (TCP_SYN | TCP_RST)))
			return; /* it answers an earlier connection from this port */
		if (was & IN_SEEN && !flow_in_window(p->seq, f->seq))
			return;
		__u32 next = p->seq + (p->key.proto == IPPROTO_TCP ? in_asks(f, p) : 0);

		/* A packet may be sent again, or be a keep-alive probe. */
		if (p->key.proto != IPPROTO_TCP || !(was & IN_SEEN) || (__s32)(next - f->seq) > 0)
			f->seq = next;
		flags |= (p->flags & TCP_FIN ? IN_FIN : 0) | (p->flags & TCP_RST ? IN_RST : 0) |
			 (p->flags & TCP_SYN ? 0 : IN_CONFIRMED);
	}
	if (was != flags)
		f->flags = flags;
}

/* in_client_uses reports whether the client's namespace has a connection with these addresses and ports, opened without
 * a service. Its replies would be taken for ours. */
static __always_inline int in_client_uses(struct __sk_buff *skb, const struct tuple *to, __u32 netns, int v6)
{
	struct bpf_sock_tuple t = {};
	struct bpf_sock *sk;
	int used;

	if (v6) {
		__builtin_memcpy(t.ipv6.saddr, &to->dst, sizeof(t.ipv6.saddr));
		__builtin_memcpy(t.ipv6.daddr, &to->src, sizeof(t.ipv6.daddr));
		t.ipv6.sport = to->dport;
		t.ipv6.dport = to->sport;
		sk = bpf_skc_lookup_tcp(skb, &t, sizeof(t.ipv6), netns, 0);
	} else {
		t.ipv4.saddr = to->dst.w[3];
		t.ipv4.daddr = to->src.w[3];
		t.ipv4.sport = to->dport;
		t.ipv4.dport = to->sport;
		sk = bpf_skc_lookup_tcp(skb, &t, sizeof(t.ipv4), netns, 0);
	}
	if (!sk)
		return 0;
	used = sk->state != BPF_TCP_LISTEN;
	bpf_sk_release(sk);
	return used;
}

volatile const __u8 in_conntrack = 0; /* 1: the kernel has the following functions */

/* Connection tracking (net/netfilter/nf_conntrack_bpf.c, Linux 5.18). The field only makes the type complete. */
struct nf_conn {
	unsigned long status;
} __attribute__((preserve_access_index));
struct bpf_ct_opts {
	__s32 netns_id, error;
	__u8 l4proto, dir, reserved[2];
};
extern struct nf_conn *bpf_skb_ct_lookup(struct __sk_buff *skb, struct bpf_sock_tuple *t, __u32 size,
					 struct bpf_ct_opts *o, __u32 opts_size) __attribute__((weak)) __ksym;
extern void bpf_ct_release(struct nf_conn *c) __attribute__((weak)) __ksym;

#define IPS_SEEN_REPLY 2
#define IPS_ASSURED 4
#define IPS_DST_NAT 32

/* in_tracked returns the status of the flow that the kernel tracks with these addresses and ports in either direction,
 * or 0 if there is none. A reply to the flow counts as seen. */
__noinline __u32 in_tracked(struct __sk_buff *skb, const struct tuple *t, __u32 proto, int v6)
{
	struct bpf_ct_opts o = { .netns_id = -1, .l4proto = proto };
	struct bpf_sock_tuple k = {};
	struct nf_conn *c;

	if (!t || !in_conntrack)
		return 0;
	if (v6) {
		__builtin_memcpy(k.ipv6.saddr, &t->src, sizeof(k.ipv6.saddr));
		__builtin_memcpy(k.ipv6.daddr, &t->dst, sizeof(k.ipv6.daddr));
		k.ipv6.sport = t->sport;
		k.ipv6.dport = t->dport;
		c = bpf_skb_ct_lookup(skb, &k, sizeof(k.ipv6), &o, sizeof(o));
	} else {
		k.ipv4.saddr = t->src.w[3];
		k.ipv4.daddr = t->dst.w[3];
		k.ipv4.sport = t->sport;
		k.ipv4.dport = t->dport;
		c = bpf_skb_ct_lookup(skb, &k, sizeof(k.ipv4), &o, sizeof(o));
	}
	if (!c)
		return 0;
	__u32 status = c->status | (o.dir ? IPS_SEEN_REPLY : 0);

	bpf_ct_release(c);
	return status;
}

/* in_free returns 1 if the flow of an entry for replies has ended, has had no answer for a while, or is the flow whose
 * client sends from. Then it sets *client to the key of an entry of that flow that has to go as well. */
static __always_inline int in_free(const struct in_flow_key *k, const struct in_flow *reply, const struct tuple *from,
				   struct in_flow_key *client)
{
	struct in_flow *f = in_other(&k->t, k->place, reply, k->proto);
	__u32 age = in_now() - reply->seen;

	tuple_set_reverse(&client->t, &reply->to);
	client->proto = k->proto;
	client->place = IN_ARRIVES;
	if (tuple_equal(&client->t, from))
		return 1;
	if (!f) /* or another CPU is about to store it */
		return age > 1;
	return in_is_closed(reply, f) || (k->proto != IPPROTO_UDP && !(reply->flags & IN_SEEN) && age > IN_UNANSWERED);
}

static __always_inline struct in_work *in_work_get(void)
{
	__u32 zero = 0;

	return bpf_map_lookup_elem(&sy_in_work, &zero);
}

#define IN_TAKEN -1

/* in_try stores the entry for replies of the flow in sy_in_work, with its source port. It returns enum reason, or
 * IN_TAKEN if another flow has the port. The verifier reads a global function once, whatever the number of tries. */
__noinline int in_try(struct __sk_buff *skb, int masked)
{
	struct in_work *w = in_work_get();

	if (!w)
		return REASON_INTERNAL_ERROR;
	struct in_flow_key *k = &w->reply_key, *old_key = &w->old_key;

	tuple_set_reverse(&k->t, &w->flow.to);
	if (masked && in_tracked(skb, &k->t, k->proto, !addr_is_v4(&k->t.dst)))
		return IN_TAKEN;
	if (!bpf_map_update_elem(&sy_in_flows, k, &w->reply, BPF_NOEXIST))
		return REASON_NONE;
	struct in_flow *old = bpf_map_lookup_elem(&sy_in_flows, k);

	if (!old)
		return REASON_FLOWS_FULL;
	if (!in_free(k, old, &w->client_key.t, old_key))
		return IN_TAKEN;
	if (!tuple_equal(&old_key->t, &w->client_key.t) && in_other(&k->t, k->place, old, k->proto))
		bpf_map_delete_elem(&sy_in_flows, old_key);
	return bpf_map_update_elem(&sy_in_flows, k, &w->reply, BPF_ANY) ? REASON_FLOWS_FULL : REASON_NONE;
}

/* in_claim stores the entry for replies of a new flow. It may change the flow's source port. It returns a reason if it
 * cannot. masked means that the source is an address of this node, from which the kernel may have a flow as well. */
static __always_inline int in_claim(struct __sk_buff *skb, struct in_work *w, int another, int masked)
{
	__u16 first = masked ? IN_MASKED_FIRST : IN_OTHER_FIRST, ports = masked ? IN_MASKED_PORTS : IN_OTHER_PORTS;

	for (int i = 0; i < IN_TRIES; i++) {
		if (i || another)
			w->flow.to.sport = bpf_htons(first + bpf_get_prandom_u32() % ports);
		int r = in_try(skb, masked);

		if (r != IN_TAKEN)
			return r;
	}
	return REASON_SNAT_EXHAUSTED;
}
