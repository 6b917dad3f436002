/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/* The service proxy of a node: connections that the node and its pods open to services, and connections of other
 * machines to the node's own addresses. A client's packet is translated where it arrives, so the kernel sees only
 * client and endpoint, and its packet filter, connection tracking, masquerading and routes work as without services.
 * The service's address is put back where the reply leaves to the client. */
#pragma once
#include "act_tc.h"
#include "inside_flow.h"

volatile const __u32 in_device_index = 0; /* the routed device, to which the routes of the services' addresses lead */

#define IN_DEVICE_MAC { 0x02, 0x53, 0x79, 0, 0, 1 } /* of the routed device */

/* in_parse_bare fills the scratch from a packet without an Ethernet header. */
__noinline int in_parse_bare(struct __sk_buff *skb)
{
	void *data = (void *)(long)skb->data, *end = (void *)(long)skb->data_end;
	struct scratch *s = scratch_begin(skb->len);

	if (!s)
		return 0;
	s->parsed = REASON_NOT_OURS;
	if (skb->protocol == bpf_htons(ETH_P_IP))
		s->parsed = parse_v4(data, end, &s->p);
	else if (skb->protocol == bpf_htons(ETH_P_IPV6))
		s->parsed = parse_v6(data, end, &s->p);
	barrier();
	if (s->parsed == REASON_NONE && s->p.fragment != FRAG_LATER)
		s->parsed = parse_l4((void *)(long)skb->data, (void *)(long)skb->data_end, &s->p);
	frag_join(&s->p);
	return 1;
}

static __always_inline struct scratch *in_parse(struct __sk_buff *skb, int bare)
{
	if (skb->vlan_present && skb->vlan_tci & 0xfff) /* of another network, whose interface has the programs as well */
		return 0;
	tc_pull(skb, HEADERS_MAX);
	struct scratch *s = (bare ? in_parse_bare(skb) : parse_tc(skb)) ? scratch_get() : 0;

	return s && s->parsed == REASON_NONE && s->p.l3 <= sizeof(struct ethhdr) ? s : 0;
}

static __always_inline void in_count(enum reason r)
{
	__u32 k = r;
	__u64 *n = bpf_map_lookup_elem(&sy_in_counters, &k);

	if (n)
		(*n)++;
}

static __always_inline struct in_ranges *in_ranges_get(void)
{
	__u32 zero = 0;

	return bpf_map_lookup_elem(&sy_in_ranges, &zero);
}

static __always_inline enum in_mode in_mode(void)
{
	struct in_ranges *r = in_ranges_get();

	return r ? r->mode : IN_ALONE;
}

/* in_covers reports whether an address may belong to a service or to this node. */
static __always_inline int in_covers(const struct in_ranges *r, const struct addr *a, int v6)
{
	for (__u32 i = 0; i < IN_RANGES; i++) {
		if (i >= (v6 ? r->n6 : r->n4))
			return 0;
		if (!v6 && (a->w[3] & r->mask4[i]) == r->net4[i])
			return 1;
		if (v6 && (a->w[0] & r->mask6[i].w[0]) == r->net6[i].w[0] &&
		    (a->w[1] & r->mask6[i].w[1]) == r->net6[i].w[1] &&
		    (a->w[2] & r->mask6[i].w[2]) == r->net6[i].w[2] &&
		    (a->w[3] & r->mask6[i].w[3]) == r->net6[i].w[3])
			return 1;
	}
	return 0;
}

static __always_inline __u32 in_addr_kinds(const struct addr *a)
{
	__u32 *kinds = bpf_map_lookup_elem(&sy_in_addrs, a);

	return kinds ? *kinds : 0;
}

/* in_service_of returns the service that a packet is for. An address takes precedence over node ports. */
static __always_inline struct in_service *in_service_of(const struct pkt *p, __u8 scope, __u32 kinds)
{
	struct in_service_key k = { .addr = p->key.t.dst, .port = p->key.t.dport, .proto = p->key.proto, .scope = scope };
	struct in_service *svc = bpf_map_lookup_elem(&sy_in_services, &k);

	if (svc || !(kinds & IN_NODE_PORTS))
		return svc;
	k.addr = p->v6 ? (struct addr){} : addr_v4mapped(0);
	return bpf_map_lookup_elem(&sy_in_services, &k);
}

static __always_inline int in_allows(const struct in_service *svc, const struct addr *source)
{
	struct in_allow_key k = { .prefix = 32 + 128, .group = bpf_htonl(svc->group), .source = *source };

	return !svc->restricted || bpf_map_lookup_elem(&sy_in_allow, &k);
}

/* in_keeps reports whether a client may keep the endpoint that it had last, which it sets. The entry may be replaced at
 * any time, so its copy is judged. */
static __always_inline int in_keeps(const struct in_service *svc, const struct in_affinity_key *k,
				    struct in_endpoint *e)
{
	struct in_affinity *a = bpf_map_lookup_elem(&sy_in_affinity, k);

	if (!a || bpf_ktime_get_coarse_ns() - a->seen > svc->affinity * SECOND)
		return 0;
	struct in_member_key m = { .list = svc->list, .endpoint = a->endpoint };

	*e = m.endpoint;
	return bpf_map_lookup_elem(&sy_in_members, &m) != 0;
}

/* in_choose sets the endpoint for a new connection. It returns 0 if there is none. */
static __always_inline int in_choose(const struct in_service *svc, const struct addr *client, struct in_endpoint *to)
{
	struct in_affinity_key ak = { .client = *client, .group = svc->group };

	if (!svc->endpoints)
		return 0;
	if (!svc->affinity || !in_keeps(svc, &ak, to)) {
		struct in_endpoint_key k = { .list = svc->list, .index = bpf_get_prandom_u32() % svc->endpoints };
		struct in_endpoint *e = bpf_map_lookup_elem(&sy_in_endpoints, &k);

		if (!e)
			return 0;
		*to = *e;
	}
	if (svc->affinity) {
		struct in_affinity a = { .endpoint = *to, .seen = bpf_ktime_get_coarse_ns() };

		bpf_map_update_elem(&sy_in_affinity, &ak, &a, BPF_ANY);
	}
	return 1;
}

/* in_source_set sets the source of packets that this node sends by a device, and reports whether there is one. */
static __always_inline int in_source_set(__u32 ifindex, struct tuple *t, int v6)
{
	struct in_source *src = bpf_map_lookup_elem(&sy_in_sources, &ifindex);

	if (!src || (v6 ? addr_is_zero(&src->v6) : !src->v4))
		return 0;
	t->src = v6 ? src->v6 : addr_v4mapped(src->v4);
	return 1;
}

/* in_route returns the index of the device to an endpoint, or 0 if it has no route, as this node itself. */
static __always_inline __u32 in_route(struct __sk_buff *skb, struct scratch *s, const struct tuple *to)
{
	s->v.t = *to;
	s->v.method = METHOD_NAT;
	long r = route_ask(skb, s->p.l3len < 1280 ? s->p.l3len : 1280, &s->p, &s->v, 0, &s->fib);

	return r == BPF_FIB_LKUP_RET_SUCCESS || r == BPF_FIB_LKUP_RET_NO_NEIGH ? s->fib.ifindex : 0;
}

static __always_inline struct in_device *in_device_of(__u32 ifindex)
{
	return bpf_map_lookup_elem(&sy_in_devices, &ifindex);
}

static __always_inline int in_is_uplink(__u32 ifindex)
{
	struct in_device *d = in_device_of(ifindex);

	return d && d->kind == IN_UPLINK;
}

/* in_forget removes the entry for replies of an earlier flow of the packet's sender. */
static __always_inline void in_forget(const struct pkt *p, struct in_work *w)
{
	struct in_flow *f = bpf_map_lookup_elem(&sy_in_flows, &w->client_key);

	if (!f || !in_other(&p->key.t, IN_ARRIVES, f, p->key.proto))
		return;
	w->old_key = (struct in_flow_key){ .t = tuple_reverse(&f->to), .proto = p->key.proto, .place = f->other };
	bpf_map_delete_elem(&sy_in_flows, &w->old_key);
}

/* in_end removes an ended flow of the packet's sender. */
static __always_inline void in_end(const struct pkt *p)
{
	struct in_work *w = in_work_get();

	if (!w)
		return;
	w->client_key = (struct in_flow_key){ .t = p->key.t, .proto = p->key.proto, .place = IN_ARRIVES };
	in_forget(p, w);
	bpf_map_delete_elem(&sy_in_flows, &w->client_key);
}

/* in_open opens the flow in sy_in_work to its endpoint. kind and netns are of the client's device; kind is 0 for the
 * routed device. It returns enum reason. It is a global function, so its stack is in use only while it runs. */
__noinline int in_open(struct __sk_buff *skb, __u32 kind, __u32 netns)
{
	struct in_work *w = in_work_get();
	struct scratch *s = scratch_get();
	int another = 0, masked = 0;

	if (!w || !s)
		return REASON_INTERNAL_ERROR;
	const struct pkt *p = &s->p;
	struct tuple *to = &w->flow.to;

	__u8 flags = kind == IN_UPLINK ? IN_FROM_OUTSIDE : 0;

	w->flow = (struct in_flow){
		.to = p->key.t, .seen = in_now(), .flags = flags | IN_SEEN, .other = IN_LEAVES, .seq = p->seq
	};
	w->reply = (struct in_flow){
		.to = tuple_reverse(&p->key.t), .seen = w->flow.seen, .flags = flags | IN_REPLY, .other = IN_ARRIVES
	};
	to->dst = w->endpoint.addr;
	to->dport = w->endpoint.port;
	if (addr_equal(to->dst.w, to->src.w)) {
		/* The client is its own endpoint, and would not accept a packet from its own address. */
		to->src = p->key.t.dst;
		w->flow.way = w->reply.way = kind ? IN_BACK : IN_DEVICE;
		w->flow.other = IN_ARRIVES;
		another = masked = kind && in_addr_kinds(&to->src) & IN_OWN; /* a socket of the node may use the port */
	} else if (kind != IN_POD && !(in_addr_kinds(&to->dst) & IN_OWN)) {
		__u32 out = in_route(skb, s, to);

		if (!out)
			return REASON_NO_ROUTE;
		if (!kind || in_is_uplink(out)) {
			w->flow.way = IN_SEND;
			w->reply.way = kind ? IN_SEND : IN_DEVICE;
			w->flow.other = IN_ARRIVES;
			another = masked = in_source_set(out, to, p->v6) && !addr_equal(to->src.w, p->key.t.src.w);
		}
	} else if (!kind) { /* another address of this node */
		to->src = p->key.t.dst;
		w->flow.way = w->reply.way = IN_DEVICE;
		w->flow.other = IN_ARRIVES;
	} else if (p->key.proto == IPPROTO_TCP && netns) {
		another = in_client_uses(skb, to, netns - 1, p->v6);
	}
	if (kind == IN_UPLINK && !another && p->key.proto == IPPROTO_TCP) /* or it has a connection without a service */
		another = (in_tracked(skb, to, IPPROTO_TCP, p->v6) & IPS_SEEN_REPLY) != 0;
	w->client_key = (struct in_flow_key){ .t = p->key.t, .proto = p->key.proto, .place = IN_ARRIVES };
	in_forget(p, w);
	w->reply_key = (struct in_flow_key){ .proto = p->key.proto, .place = w->flow.other };
	int why = in_claim(skb, w, another, masked);

	if (why != REASON_NONE)
		return why;
	if (!bpf_map_update_elem(&sy_in_flows, &w->client_key, &w->flow, BPF_ANY))
		return REASON_NONE;
	bpf_map_delete_elem(&sy_in_flows, &w->reply_key);
	return REASON_FLOWS_FULL;
}
