/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/* What the programs of the service proxy do with a packet. from is the device of the sender, or NULL for this node
 * itself, whose packets to services leave by the routed device. */
#pragma once
#include "inside.h"

#ifndef IN_NOTE /* inside_trace.bpf.c */
#define IN_NOTE(reason, reply, way)
#endif

static __always_inline struct in_flow *in_lookup(const struct pkt *p, enum in_place place)
{
	struct in_flow_key k = { .t = p->key.t, .proto = p->key.proto, .place = place };

	return bpf_map_lookup_elem(&sy_in_flows, &k);
}

static __always_inline int in_drop(enum reason r)
{
	in_count(r);
	IN_NOTE(r, 0, 0);
	return TC_ACT_SHOT;
}

/* in_answer sends the packet back as its answer. */
static __always_inline int in_answer(struct __sk_buff *skb, struct scratch *s, int from_device)
{
	answer_ratelimit();
	in_count(s->v.reason);
	if (s->v.action <= ACTION_FORWARD || !s->p.l3 || !tc_answer(skb)) /* an answer needs an Ethernet header */
		return TC_ACT_SHOT;
	return bpf_redirect(skb->ifindex, from_device ? 0 : BPF_F_INGRESS);
}

static __always_inline int in_refuse(struct __sk_buff *skb, struct scratch *s, int from_device, enum reason r)
{
	verdict_refuse(&s->p, &s->v, r);
	return in_answer(skb, s, from_device);
}

static __always_inline int in_back(struct __sk_buff *skb, __u8 l3)
{
	struct ethhdr *eth = (void *)(long)skb->data;
	__u8 mac[ETH_ALEN];

	if (!l3)
		return bpf_redirect(skb->ifindex, 0);
	if ((void *)(eth + 1) > (void *)(long)skb->data_end)
		return TC_ACT_SHOT;
	__builtin_memcpy(mac, eth->dst, ETH_ALEN);
	__builtin_memcpy(eth->dst, eth->src, ETH_ALEN);
	__builtin_memcpy(eth->src, mac, ETH_ALEN);
	return bpf_redirect(skb->ifindex, 0);
}

/* in_bridge addresses a frame to the endpoint if it is behind the client's bridge. Otherwise only one direction of the
 * flow would pass the routing code, and connection tracking would call its packets invalid. */
static __always_inline int in_bridge(struct __sk_buff *skb, struct scratch *s, __u32 bridge)
{
	if (route_ask(skb, 0, &s->p, &s->v, 0, &s->fib) == BPF_FIB_LKUP_RET_SUCCESS && s->fib.ifindex == bridge)
		bpf_skb_store_bytes(skb, 0, s->fib.dmac, ETH_ALEN, 0);
	return TC_ACT_UNSPEC;
}

/* in_send translates a packet and sends it to its next hop. */
static __always_inline int in_send(struct __sk_buff *skb, struct scratch *s, int forwarded)
{
	long r;

	if (forwarded && s->p.ttl <= 1)
		return in_drop(REASON_TTL_EXPIRED);
	s->p.keep_ttl = !forwarded;
	r = route_ask(skb, tc_segment_len(skb, &s->p), &s->p, &s->v, 0, &s->fib);
	if (r == BPF_FIB_LKUP_RET_FRAG_NEEDED) {
		if (route_too_big(&s->p, &s->v, s->fib.mtu_result) == ROUTE_NONE)
			return in_answer(skb, s, forwarded);
		s->p.keep_ttl = 1;
		return s->p.l3 && tc_transform(skb) ? tc_as_from_lo(skb) : in_drop(REASON_TOO_BIG);
	}
	if (r != BPF_FIB_LKUP_RET_SUCCESS && r != BPF_FIB_LKUP_RET_NO_NEIGH)
		return in_drop(REASON_NO_ROUTE);
	__u32 out = s->fib.ifindex;

	return tc_transform(skb) ? bpf_redirect_neigh(out, 0, 0, 0) : TC_ACT_SHOT;
}

/* in_begin notes a packet of a flow, and prepares its translation. */
static __always_inline void in_begin(struct scratch *s, struct in_flow *f)
{
	in_touch(f, &s->p);
	if (s->p.fragment == FRAG_FIRST)
		frag_learn(&s->p);
	s->v.t = f->to;
	s->v.method = METHOD_NAT;
	IN_NOTE(REASON_FORWARDED, (f->flags & IN_REPLY) != 0, f->way);
}

/* in_enter passes a packet to the stack as if it had arrived on the routed device. */
static __always_inline int in_enter(struct __sk_buff *skb, const struct scratch *s)
{
	struct ethhdr eth = { .dst = IN_DEVICE_MAC, .proto = s->p.v6 ? bpf_htons(ETH_P_IPV6) : bpf_htons(ETH_P_IP) };

	if (!s->p.l3 && bpf_skb_change_head(skb, sizeof(eth), 0))
		return in_drop(REASON_INTERNAL_ERROR);
	if (bpf_skb_store_bytes(skb, 0, &eth, sizeof(eth), 0))
		return in_drop(REASON_INTERNAL_ERROR);
	return bpf_redirect(in_device_index, BPF_F_INGRESS);
}

/* in_translate translates a packet of a flow and sends it on. */
static __always_inline int in_translate(struct __sk_buff *skb, struct scratch *s, struct in_flow *f,
					const struct in_device *from)
{
	__u8 way = f->way;

	in_begin(s, f);
	if (way == IN_SEND)
		return in_send(skb, s, from != 0);
	s->p.keep_ttl = 1;
	if (!tc_transform(skb))
		return in_drop(REASON_INTERNAL_ERROR);
	if (way == IN_BACK)
		return in_back(skb, s->p.l3);
	if (way == IN_DEVICE)
		return in_enter(skb, s);
	return from && from->bridge ? in_bridge(skb, s, from->bridge) : TC_ACT_UNSPEC;
}

/* in_continues reports whether a packet belongs to the flow that was found. A SYN may open another one, for example if
 * it is sent again because the endpoint has not answered: that may be gone. */
static __always_inline int in_continues(const struct pkt *p, const struct in_flow *f)
{
	if (!pkt_is_stream(p) || !pkt_opens_flow(p))
		return 1;
	struct in_flow *o = in_other(&p->key.t, IN_ARRIVES, f, p->key.proto);

	return o && !in_is_closed(f, o) && (o->flags & IN_SEEN || f->seen == in_now());
}

/* in_connect opens a flow to the endpoint in w. */
static __always_inline int in_connect(struct __sk_buff *skb, struct scratch *s, const struct in_device *from,
				      struct in_work *w)
{
	int why = in_open(skb, from ? from->kind : 0, from ? from->netns : 0);

	if (why != REASON_NONE)
		return in_drop(why < REASON_MAX ? why : REASON_INTERNAL_ERROR);
	in_count(REASON_NONE);
	return in_translate(skb, s, &w->flow, from);
}

/* in_outside_add counts a flow of another machine, unless these have their share of the table. */
static __always_inline int in_outside_add(void)
{
	__u32 zero = 0, *n = bpf_map_lookup_elem(&sy_in_outside, &zero);

	if (!n || *n >= IN_FLOWS / 2)
		return 0;
	__sync_fetch_and_add(n, 2);
	return 1;
}

/* in_is_others reports whether a packet to a service that belongs to no known flow may belong to one of another service
 * proxy, or is the reply to a pod whose packets leave with an address of this node. If nobody translates it, it reaches
 * the routed device. */
static __always_inline int in_is_others(struct __sk_buff *skb, const struct pkt *p, int outside)
{
	int udp = p->key.proto == IPPROTO_UDP;
	enum in_mode mode = in_mode();

	if (!pkt_opens_flow(p))
		return 1;
	if (mode == IN_DRAINING) {
		in_end(p); /* an earlier flow from this port, which the next packets would otherwise match */
		return 1;
	}
	if (mode == IN_ALONE && !(udp && outside))
		return 0;
	__u32 status = in_tracked(skb, &p->key.t, p->key.proto, p->v6);

	if (udp && outside && status & IPS_SEEN_REPLY)
		return 1;
	return status & IPS_DST_NAT && (udp || !(status & IPS_ASSURED)); /* a SYN again, or one after a connection */
}

/* in_new handles a packet to a service that belongs to no known flow. */
static __always_inline int in_new(struct __sk_buff *skb, struct scratch *s, const struct in_device *from,
				  const struct in_service *svc)
{
	int outside = from && from->kind == IN_UPLINK;
	__u32 source = in_addr_kinds(&s->p.key.t.src);

	if (source & IN_CLUSTER || (from && source & IN_OWN)) /* servers could answer each other endlessly */
		return in_drop(REASON_SOURCE_IS_LOCAL);
	if (!in_allows(svc, &s->p.key.t.src))
		return in_drop(REASON_NOT_ALLOWED);
	if (from && in_is_others(skb, &s->p, outside))
		return TC_ACT_UNSPEC;
	if (!pkt_opens_flow(&s->p)) /* or connection tracking did not translate a packet because it seems invalid */
		return in_mode() == IN_ALONE ? in_refuse(skb, s, 0, REASON_NO_FLOW) : in_drop(REASON_NO_FLOW);
	if (!svc->endpoints)
		return svc->drop ? in_drop(REASON_NO_LOCAL_BACKEND) :
				   in_refuse(skb, s, from != 0, REASON_NO_BACKEND);
	struct in_work *w = in_work_get();

	if (!w || (outside && !in_outside_add()))
		return in_drop(REASON_FLOWS_FULL);
	if (!in_choose(svc, &s->p.key.t.src, &w->endpoint))
		return in_drop(REASON_NO_BACKEND);
	return in_connect(skb, s, from, w);
}

/* in_direct handles a packet that is for no service. If its sender has or had a connection to the same address through
 * a service, from the same port, the replies would be taken for that connection's. So an entry of an ended one is
 * removed, and beside a live one the new connection gets another source port. */
static __always_inline int in_direct(struct __sk_buff *skb, struct scratch *s, const struct in_device *from)
{
	const struct pkt *p = &s->p;
	__u32 zero = 0, *direct = bpf_map_lookup_elem(&sy_in_direct, &zero);
	struct in_flow *f;

	if (!direct || !proto_has_ports(p->key.proto))
		return TC_ACT_UNSPEC;
	if (*direct) {
		f = in_lookup(p, IN_ARRIVES);
		if (f && in_continues(p, f))
			return in_translate(skb, s, f, from);
	}
	if (!pkt_opens_flow(p))
		return TC_ACT_UNSPEC;
	struct in_flow_key k = { .t = tuple_reverse(&p->key.t), .proto = p->key.proto, .place = IN_LEAVES };

	f = bpf_map_lookup_elem(&sy_in_flows, &k);
	if (!f)
		return TC_ACT_UNSPEC;
	struct in_flow *o = in_other(&k.t, IN_LEAVES, f, p->key.proto);

	if (!o || in_is_closed(f, o)) {
		bpf_map_delete_elem(&sy_in_flows, &k);
		return TC_ACT_UNSPEC;
	}
	struct in_work *w = in_work_get();

	if (!w || (from->kind == IN_UPLINK && !in_outside_add()))
		return in_drop(REASON_FLOWS_FULL);
	*direct = in_now();
	w->endpoint = (struct in_endpoint){ .addr = p->key.t.dst, .port = p->key.t.dport };
	return in_connect(skb, s, from, w);
}

static __always_inline int in_arrives(struct __sk_buff *skb, struct scratch *s, const struct in_device *from)
{
	const struct pkt *p = &s->p;
	struct in_ranges *r = in_ranges_get();

	if (!r)
		return TC_ACT_UNSPEC;
	if (!in_covers(r, &p->key.t.dst, p->v6))
		return in_direct(skb, s, from);
	struct in_flow *f = in_lookup(p, IN_ARRIVES);

	/* A pod's flow that opened through the routed device, before its own device had the programs, stays there. */
	if (f && from->kind == IN_POD && f->way == IN_SEND)
		return TC_ACT_UNSPEC;
	int outside = from->kind == IN_UPLINK;

	/* The other service proxy does not know which source ports are in use here. */
	if (f && outside && r->mode == IN_DRAINING && in_tracked(skb, &p->key.t, p->key.proto, p->v6) & IPS_SEEN_REPLY)
		return TC_ACT_UNSPEC;
	if (f && in_continues(p, f))
		return in_translate(skb, s, f, from);
	if (pkt_without_l4(p) || !proto_has_ports(p->key.proto))
		return TC_ACT_UNSPEC;
	__u32 kinds = in_addr_kinds(&p->key.t.dst);

	if (kinds == IN_LOCAL || (outside && !(kinds & IN_OWN)))
		return TC_ACT_UNSPEC;
	struct in_service *svc = in_service_of(p, outside ? IN_OUTSIDE : IN_INSIDE, kinds);

	if (svc)
		return in_new(skb, s, from, svc);
	if (kinds & IN_CLUSTER && r->mode != IN_DRAINING)
		return in_refuse(skb, s, 1, REASON_NO_FRONTEND);
	return in_direct(skb, s, from);
}

/* in_from_node handles a packet that this node sends or forwards to the routed device. Nothing leaves that is not
 * translated. Other machines do not reach services by it. */
static __always_inline int in_from_node(struct __sk_buff *skb, struct scratch *s)
{
	const struct pkt *p = &s->p;

	if (skb->ingress_ifindex && in_is_uplink(skb->ingress_ifindex))
		return in_drop(REASON_NOT_ALLOWED);
	struct in_flow *f = in_lookup(p, IN_ARRIVES);

	if (f && in_continues(p, f))
		return in_translate(skb, s, f, 0);
	if (pkt_without_l4(p) || !proto_has_ports(p->key.proto))
		return in_drop(p->fragment == FRAG_LATER ? REASON_FRAGMENT_NOT_FOUND : REASON_UNSUPPORTED_PROTOCOL);
	__u32 kinds = in_addr_kinds(&p->key.t.dst);
	struct in_service *svc = in_service_of(p, IN_INSIDE, 0);

	if (svc)
		return in_new(skb, s, 0, svc);
	return kinds & IN_CLUSTER ? in_refuse(skb, s, 0, REASON_NO_FRONTEND) : in_drop(REASON_NO_FRONTEND);
}

/* in_leaves puts the service's address back into a reply. */
static __always_inline int in_leaves(struct __sk_buff *skb, struct scratch *s)
{
	struct in_flow *f = in_lookup(&s->p, IN_LEAVES);

	if (!f)
		return TC_ACT_UNSPEC;
	in_begin(s, f);
	s->p.keep_ttl = 1;
	return tc_transform(skb) ? TC_ACT_UNSPEC : in_drop(REASON_INTERNAL_ERROR);
}

/* The steps of the programs on devices. inside.bpf.c and inside_trace.bpf.c are built from them. */
static __always_inline int in_steps_arrive(struct __sk_buff *skb, const struct in_device *from)
{
	struct scratch *s = from ? in_parse(skb, from->bare) : 0;

	return s ? in_arrives(skb, s, from) : TC_ACT_UNSPEC;
}

static __always_inline int in_steps_leave(struct __sk_buff *skb, const struct in_device *to)
{
	struct scratch *s = to ? in_parse(skb, to->bare) : 0;

	return s ? in_leaves(skb, s) : TC_ACT_UNSPEC;
}

static __always_inline int in_steps_send(struct __sk_buff *skb)
{
	struct scratch *s = in_parse(skb, 0);

	return s ? in_from_node(skb, s) : TC_ACT_SHOT;
}
