/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/* decide: struct pkt → struct verdict. It accesses neither packet nor context and only reads maps, so XDP, tc and
 * explain run the same code. It returns the flow's entry so that commit needs no second lookup. With a million flows,
 * that lookup would be the largest cost of a packet. */
#pragma once
#include "spread.h"

static __always_inline int is_echo_request(const struct pkt *p)
{
	return !p->fragment && ((!p->v6 && p->key.proto == IPPROTO_ICMP && p->icmp_type == ICMP_ECHO) ||
				(p->v6 && p->key.proto == IPPROTO_ICMPV6 && p->icmp_type == ICMP6_ECHO));
}

/* decide_vip handles packets to a VIP without a matching frontend. It never passes them to the stack, which would route
 * them back. */
static __always_inline struct flow *decide_vip(const struct pkt *p, struct verdict *v, const struct vip *vip)
{
	if (p->fragment == FRAG_LATER)
		return verdict_set(v, ACTION_DROP, REASON_FRAGMENT_NOT_FOUND);
	if (proto_has_ports(p->key.proto))
		return verdict_refuse(p, v, REASON_NO_FRONTEND);
	/* The stack would also route back a packet that was not sent on the link (RFC 4861, 6.1 and 7.1). */
	if (p->v6 && p->key.proto == IPPROTO_ICMPV6 && p->icmp_type >= ND_FIRST && p->icmp_type <= ND_LAST &&
	    p->ttl == 255)
		return verdict_set(v, ACTION_PASS, REASON_NEIGHBOUR_DISCOVERY);
	if (is_echo_request(p)) {
		if (!vip->up)
			return verdict_set(v, ACTION_DROP, REASON_VIP_DOWN);
		return verdict_set(v, ACTION_ECHO, REASON_ECHO_REPLY);
	}
	return verdict_set(v, ACTION_DROP, REASON_UNSUPPORTED_PROTOCOL);
}

/* frag_unresolved reports whether a packet is a later fragment whose ports are unknown. */
static __always_inline int frag_unresolved(const struct pkt *p)
{
	return p->fragment == FRAG_LATER && !(p->key.t.sport | p->key.t.dport);
}

/* decide_service is decide for a packet to a frontend. */
static __always_inline struct flow *decide_service(const struct pkt *p, struct verdict *v, struct frontend *fe,
						   const struct decap_ctx *in, const int leave_local)
{
	v->frontend = fe->id;
	v->counted = 1;
	if (local_delivery && leave_local && fe->local) {
		v->local = 1;
		return verdict_set(v, ACTION_FORWARD, REASON_FORWARDED);
	}
	if (local_delivery && fe->chained)
		return decide_spread(p, v, fe, in, leave_local);
	return fe->method == METHOD_NAT ? decide_nat(p, v, fe) : decide_dsr(p, v, fe);
}

/* decide_source drops a packet that would open a flow or be answered if its source is a VIP, an address of this node,
 * or a broadcast address of its links. Otherwise servers could answer each other endlessly through their VIPs. It
 * checks neither packets of known flows nor stream packets that open no flow. */
static __always_inline void decide_source(const struct pkt *p, struct verdict *v)
{
	if ((v->commit == COMMIT_NONE && v->action <= ACTION_FORWARD && pkt_is_stream(p)) ||
	    !(addr_kinds(&p->key.t.src) & (ADDR_VIP | ADDR_OWN)))
		return;
	if (bpf_map_lookup_elem(&sy_vips, &p->key.t.src) || bpf_map_lookup_elem(&sy_local_addrs, &p->key.t.src))
		verdict_drop(v, REASON_SOURCE_IS_LOCAL);
}

/* in is the context of a decapsulated packet, or NULL. With leave_local, the verdict for backends on this node only
 * says that they are local, because tc looks up their flows and delivers the packets. */
static __always_inline struct flow *decide(const struct pkt *p, enum reason parsed, struct verdict *v,
					   const struct decap_ctx *in, const int leave_local)
{
	if (parsed == REASON_NOT_OURS)
		return verdict_set(v, ACTION_PASS, REASON_NOT_OURS);
	__u8 to = addr_kinds(&p->key.t.dst);

	if (!in && parsed == REASON_NONE && to & ADDR_OWN && decide_tunnel(p, v))
		return 0;
	if (parsed == REASON_NONE && proto_has_ports(p->key.proto) && !frag_unresolved(p)) {
		struct frontend *fe = to & ADDR_VIP ? frontend_lookup(&p->key, 0) : 0;

		if (fe) {
			v->hash = flow_hash(&p->key, ALGORITHM_FLOW_HASH);
			struct flow *f = decide_service(p, v, fe, in, leave_local);

			if (!f)
				decide_source(p, v);
			return f;
		}
		/* A reply that is not for an address of this node belongs to a frontend that keeps the source. */
		if ((!(to & ADDR_OWN) || snat_is_used(p->key.t.dport)) && addr_kinds(&p->key.t.src) & ADDR_BACKEND) {
			struct flow *f = nat_find_reply(p, v);

			if (f) {
				v->hash = flow_hash(&p->key, ALGORITHM_FLOW_HASH);
				return decide_reply(p, v, f);
			}
			v->half_open = 0;
		}
	}
	if (!(to & ADDR_VIP))
		return verdict_set(v, ACTION_PASS, REASON_NOT_OURS);
	struct vip *vip = bpf_map_lookup_elem(&sy_vips, &p->key.t.dst);

	if (!vip)
		return verdict_set(v, ACTION_PASS, REASON_NOT_OURS);
	if (parsed != REASON_NONE)
		return verdict_set(v, ACTION_DROP, parsed);
	/* The sending node has a frontend that this node does not have yet, and the client will send again. An echo request
	 * is that node's probe. */
	if (in && !is_echo_request(p))
		return verdict_set(v, ACTION_DROP, frag_unresolved(p) ? REASON_FRAGMENT_NOT_FOUND : REASON_NO_FRONTEND);
	decide_vip(p, v, vip);
	decide_source(p, v);
	return 0;
}
