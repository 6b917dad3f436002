/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/* decide: struct pkt → struct verdict. It touches no packet and no context and only reads maps: XDP, tc and explain
 * run the very same code. It returns the entry of a known flow, so that commit need not look it up again: among a
 * million flows that costs more than all the rest. */
#pragma once
#include "spread.h"

/* To a VIP, but not to a frontend: never to the stack, which would route it back to where it came from. */
static __always_inline struct flow *decide_vip(const struct pkt *p, struct verdict *v, const struct vip *vip)
{
	if (p->fragment == LATER)
		return say(v, ACTION_DROP, REASON_FRAGMENT);
	if (has_ports(p->key.proto))
		return refuse(p, v, REASON_NO_FRONTEND);
	if (p->v6 && p->key.proto == IPPROTO_ICMPV6 && p->icmp >= ND_FIRST && p->icmp <= ND_LAST)
		return say(v, ACTION_PASS, REASON_NEIGHBOUR);
	if (!p->fragment && ((!p->v6 && p->key.proto == IPPROTO_ICMP && p->icmp == ICMP_ECHO) ||
			     (p->v6 && p->key.proto == IPPROTO_ICMPV6 && p->icmp == ICMP6_ECHO))) {
		if (!vip->up)
			return say(v, ACTION_DROP, REASON_VIP_DOWN);
		return say(v, ACTION_ECHO, REASON_ECHO);
	}
	return say(v, ACTION_DROP, REASON_PROTOCOL);
}

/* unjoined: a later fragment whose ports nobody knows. */
static __always_inline int unjoined(const struct pkt *p)
{
	return p->fragment == LATER && !(p->key.t.sport | p->key.t.dport);
}

/* in: how the packet came out of its tunnel; NULL when it was in none. */
static __always_inline struct flow *decide(const struct pkt *p, enum reason parsed, struct verdict *v, const struct inside *in)
{
	if (parsed == REASON_NOT_OURS)
		return say(v, ACTION_PASS, REASON_NOT_OURS);
	if (!in && parsed == REASON_NONE && decide_tunnel(p, v))
		return 0;
	if (parsed == REASON_NONE && has_ports(p->key.proto) && !unjoined(p)) {
		if (in_snat_range(p->key.t.dport)) {
			struct flow *f = find(&p->key, &v->half);

			if (f && f->reply)
				return decide_reply(p, v, f);
			v->half = 0;
		}
		struct frontend *fe = frontend_of(&p->key, 0);

		if (fe) {
			v->frontend = fe->id;
			v->counted = 1;
			if (delivers && fe->chained)
				return decide_spread(p, v, fe, in);
			return fe->method == METHOD_NAT ? decide_nat(p, v, fe) : decide_oneway(p, v, fe);
		}
	}
	struct vip *vip = bpf_map_lookup_elem(&vips, &p->key.t.dst);

	if (!vip)
		return say(v, ACTION_PASS, REASON_NOT_OURS);
	if (parsed != REASON_NONE)
		return say(v, ACTION_DROP, parsed);
	if (in) /* who sent it knows a frontend that we do not know yet: the client tries again */
		return say(v, ACTION_DROP, unjoined(p) ? REASON_FRAGMENT : REASON_NO_FRONTEND);
	return decide_vip(p, v, vip);
}
