/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/* The path MTU to a server behind a tunnel, as routers report it. Anybody can send such a report. So it is believed
 * only if it quotes a packet that this node may have sent, and it cannot make packets smaller than every path must
 * carry. */
#pragma once
#include "maps.h"
#include "parse.h"

#define TUNNEL_SPORT_FIRST 0xc000 /* first source port of tunnel packets; the last is 65535 */

#define PMTU_LIFETIME (600 * SECOND) /* RFC 1191, 6.3; RFC 8201, 4 */

static __always_inline int pmtu_is_fresh(const struct pmtu *path)
{
	return path->mtu && bpf_ktime_get_coarse_ns() - path->seen <= PMTU_LIFETIME;
}

/* pmtu_quotes_tunnel reports whether an ICMP error quotes a tunnel packet for a VIP. Routers quote as much as fits (RFC
 * 1812, 4.3.2.3; RFC 4443, 3.2). A quote that ends before the inner destination, as from a router that follows only RFC
 * 792, is not believed. It shows only the outer addresses and ports, which are the same for all clients. */
static __always_inline int pmtu_quotes_tunnel(const struct pkt *p)
{
	int gue = p->key.proto == IPPROTO_UDP && p->key.t.sport == bpf_htons(tunnel_port) &&
		  bpf_ntohs(p->key.t.dport) >= TUNNEL_SPORT_FIRST;

	if (!gue && p->key.proto != IPPROTO_IPIP && p->key.proto != IPPROTO_IPV6)
		return 0;
	if (!bpf_map_lookup_elem(&sy_local_addrs, &p->key.t.dst))
		return 0;
	return bpf_map_lookup_elem(&sy_vips, &p->quoted_dst) != 0;
}

/* pmtu_is_report reports whether a packet is an ICMP error with a credible path MTU. A router sends it in response to a
 * larger packet, and a report never raises an estimate (RFC 8201, 4). */
static __always_inline int pmtu_is_report(const struct pkt *p)
{
	if (!p->icmp_error || p->mtu < MIN_MTU || p->mtu >= p->quoted_len)
		return 0;
	struct pmtu *path = bpf_map_lookup_elem(&sy_pmtu, &p->key.t.src);

	return path && (!pmtu_is_fresh(path) || p->mtu < path->mtu) && pmtu_quotes_tunnel(p);
}
