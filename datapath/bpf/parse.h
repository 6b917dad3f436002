/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/* parse: frame → struct pkt. It needs only the bytes, so XDP, tc and explain share it. */
#pragma once
#include <bpf/bpf_endian.h>
#include "config.h"
#include "headers.h"
#include "types.h"

enum frag_kind {
	FRAG_NONE,
	FRAG_FIRST, /* first of several, with the ports */
	FRAG_LATER,
};

struct pkt {
	/* For an ICMP error: the key of the flow that it is about, in the direction in which it arrives here. */
	struct flow_key key;
	__u32 seq, ack; /* host order; TCP, or SCTP with tags instead of sequence numbers */
	__u32 len; /* length of the frame */
	__u32 l3len; /* total length of the IP packet, including its header */
	__u32 payload; /* TCP: length of the payload */
	__u32 frag_id; /* identification of the fragmented datagram */
	__u32 mtu; /* reported by an ICMP error */
	__u32 quoted_len; /* total length of the packet that an ICMP error quotes */
	struct addr quoted_dst; /* destination of the inner packet in a quoted tunnel packet; zero: not quoted */
	__u32 tsval; /* timestamp (RFC 7323) of TCP with SYN or FIN; 0: none */
	__u16 l4; /* offset of the transport header in the frame */
	__u8 l3; /* offset of the IP header */
	__u8 v6, ttl, tos;
	__u8 flags; /* TCP flags, or the nearest equivalent for SCTP */
	__u8 icmp_type;
	__u8 icmp_error; /* 1: an ICMP error that quotes a packet with ports or one of our tunnel packets */
	__u8 fragment; /* enum frag_kind */
	__u8 dont_fragment; /* 1: DF is set, or IPv6 */
	__u8 keep_ttl; /* 1: the stack decrements the TTL */
	__u8 sampled; /* 1: the packet refreshes its direct-return flow */
	__u8 made; /* synthetic packets: last byte of the source MAC address, never 0 */
	__u8 pad[2];
};

/* The context of a decapsulated packet. */
struct decap_ctx {
	struct chain chain;
	struct addr outer_dst; /* destination of the outer header, which is our address */
};

#define IP6_EXTENSIONS_MAX 6

/* Bounds for the verifier. */
#define L3(p) ((p)->l3 & 31)
#define L4(p) ((p)->l4 & 1023)

static __always_inline struct addr addr_v4mapped(__be32 v4)
{
	return (struct addr){ .w = { 0, 0, bpf_htonl(0xffff), v4 } };
}

static __always_inline int addr_is_v4(const struct addr *a)
{
	return !(a->w[0] | a->w[1]) && a->w[2] == bpf_htonl(0xffff);
}

static __always_inline int addr_equal(const __u32 *a, const __u32 *b)
{
	return a[0] == b[0] && a[1] == b[1] && a[2] == b[2] && a[3] == b[3];
}

/* addr_is_martian4 reports whether a source is never on the wire: 0.0.0.0/8, 127.0.0.0/8, multicast and above (RFC
 * 6890, 2.2.2). */
static __always_inline int addr_is_martian4(__be32 src)
{
	__u8 first = bpf_ntohl(src) >> 24;

	return first == 0 || first == 127 || first >= 224;
}

/* addr_is_martian6 does the same for IPv6: ::/96, with the unspecified and loopback addresses, and multicast (RFC 6890,
 * 2.2.3). */
static __always_inline int addr_is_martian6(const struct addr *src)
{
	return !(src->w[0] | src->w[1] | src->w[2]) || (src->w[0] & bpf_htonl(0xff000000)) == bpf_htonl(0xff000000);
}

static __always_inline int proto_has_ports(__u8 proto)
{
	return proto == IPPROTO_TCP || proto == IPPROTO_UDP || proto == IPPROTO_SCTP;
}

/* parse_l3len returns the length of an IP packet, given its length field len, which does not count hlen bytes of
 * header. In tc, BIG TCP packets exceed the field, which is then 0. */
static __always_inline __u32 parse_l3len(const struct pkt *p, __u32 len, __u32 hlen)
{
	return len || p->len <= 0xffff ? len + hlen : p->len - L3(p);
}

static __always_inline enum reason parse_v4(void *data, void *end, struct pkt *p)
{
	struct iphdr *ip = data + L3(p);

	if ((void *)(ip + 1) > end)
		return REASON_MALFORMED;
	__u32 hlen = (ip->ver_ihl & 15) * 4;

	p->l3len = parse_l3len(p, bpf_ntohs(ip->len), 0);
	p->key.t.src = addr_v4mapped(ip->src);
	p->key.t.dst = addr_v4mapped(ip->dst);
	if (ip->ver_ihl >> 4 != 4 || hlen < sizeof(*ip) || p->l3len < hlen || addr_is_martian4(ip->src))
		return REASON_MALFORMED;
	p->key.proto = ip->proto;
	p->ttl = ip->ttl;
	p->tos = ip->tos;
	p->l4 = p->l3 + hlen;
	p->frag_id = ip->id;
	p->dont_fragment = (ip->frag & bpf_htons(IP_DF)) != 0;
	if (ip->frag & bpf_htons(IP_OFFSET))
		p->fragment = FRAG_LATER;
	else if (ip->frag & bpf_htons(IP_MF))
		p->fragment = FRAG_FIRST;
	return REASON_NONE;
}

static __always_inline enum reason parse_v6(void *data, void *end, struct pkt *p)
{
	struct ip6hdr *ip = data + L3(p);

	if ((void *)(ip + 1) > end)
		return REASON_MALFORMED;
	__builtin_memcpy(&p->key.t.src, &ip->src, sizeof(p->key.t.src));
	__builtin_memcpy(&p->key.t.dst, &ip->dst, sizeof(p->key.t.dst));
	/* ::ffff:0:0/96 would be mistaken for IPv4. */
	if (addr_is_martian6(&p->key.t.src) || addr_is_v4(&p->key.t.src) || addr_is_v4(&p->key.t.dst))
		return REASON_MALFORMED;
	p->v6 = 1;
	p->ttl = ip->hop_limit;
	p->tos = bpf_ntohl(ip->ver_class_label) >> 20;
	p->l3len = parse_l3len(p, bpf_ntohs(ip->len), sizeof(*ip));
	p->dont_fragment = 1;

	__u8 next = ip->next;
	__u32 off = L3(p) + sizeof(*ip);

	for (int i = 0; i < IP6_EXTENSIONS_MAX; i++) {
		struct ip6ext *x = data + off;

		if (next != IPPROTO_HOPOPTS && next != IPPROTO_ROUTING && next != IPPROTO_DSTOPTS &&
		    next != IPPROTO_FRAGMENT)
			break;
		if ((void *)(x + 1) > end)
			return REASON_MALFORMED;
		if (next == IPPROTO_FRAGMENT) {
			struct ip6frag *frag = data + off;

			if ((void *)(frag + 1) > end)
				return REASON_MALFORMED;
			p->frag_id = frag->id;
			p->fragment = frag->frag & bpf_htons(IP6_OFFSET) ? FRAG_LATER : FRAG_FIRST;
			off += sizeof(*frag);
			next = frag->next;
			if (p->fragment == FRAG_LATER)
				break;
			continue;
		}
		next = x->next;
		off += (x->len + 1) * 8;
		if (off > 512)
			return REASON_MALFORMED;
	}
	p->key.proto = next;
	p->l4 = off;
	return REASON_NONE;
}

/* parse_sctp maps an association to a TCP connection: the tag that a side chooses becomes its sequence number. */
static __always_inline enum reason parse_sctp(void *l4, void *end, struct pkt *p, __u32 room)
{
	struct sctphdr *sctp = l4;

	if ((void *)(sctp + 1) > end || room < sizeof(*sctp))
		return REASON_MALFORMED;
	p->key.t.sport = sctp->sport;
	p->key.t.dport = sctp->dport;
	p->ack = bpf_ntohl(sctp->vtag);
	p->flags = TCP_ACK;
	switch (sctp->chunk) {
	case SCTP_INIT:
	case SCTP_INIT_ACK: {
		__be32 *tag = l4 + sizeof(*sctp);

		if ((void *)(tag + 1) > end || room < sizeof(*sctp) + sizeof(*tag))
			return REASON_MALFORMED;
		p->flags = sctp->chunk == SCTP_INIT ? TCP_SYN : TCP_SYN | TCP_ACK;
		p->seq = bpf_ntohl(*tag);
		break;
	}
	case SCTP_ABORT:
	case SCTP_SHUTDOWN_COMPLETE:
		p->flags = TCP_RST;
		break;
	case SCTP_SHUTDOWN:
	case SCTP_SHUTDOWN_ACK:
		p->flags = TCP_FIN | TCP_ACK;
		break;
	case SCTP_ERROR: /* acknowledges nothing, because a server without an association sends it for a stale cookie */
		p->flags = 0;
		break;
	}
	return REASON_NONE;
}

/* parse_quote_tunnel reads the packet inside a quoted tunnel packet, whose transport header is at l4. */
static __always_inline void parse_quote_tunnel(void *data, void *end, struct pkt *p, __u32 l4)
{
	struct udp_gue {
		struct udphdr udp;
		struct guehdr gue;
	} *outer = data + (l4 & 1023);
	__u8 inner = p->key.proto;

	if (inner == IPPROTO_UDP && p->key.t.sport == bpf_htons(tunnel_port)) {
		if ((void *)(outer + 1) > end || outer->gue.version_len & 0xe0)
			return;
		inner = outer->gue.proto;
		l4 += sizeof(*outer) + (outer->gue.version_len & 31) * 4;
	}
	struct iphdr *ip4 = data + (l4 & 1023);
	struct ip6hdr *ip6 = data + (l4 & 1023);

	if (inner == IPPROTO_IPIP && (void *)(ip4 + 1) <= end)
		p->quoted_dst = addr_v4mapped(ip4->dst);
	else if (inner == IPPROTO_IPV6 && (void *)(ip6 + 1) <= end)
		__builtin_memcpy(&p->quoted_dst, &ip6->dst, sizeof(p->quoted_dst));
}

/* parse_quote_v4 reads the packet that an ICMP error quotes. If it cannot, p->icmp_error stays 0. */
static __always_inline void parse_quote_v4(void *data, void *end, struct pkt *p)
{
	struct quote {
		struct iphdr ip;
		__be16 sport, dport;
		__be32 more;
	} *q = data + L4(p) + sizeof(struct icmphdr);

	if ((void *)(q + 1) > end || q->ip.ver_ihl != 0x45 || q->ip.frag & bpf_htons(IP_OFFSET) ||
	    q->ip.src != p->key.t.dst.w[3])
		return;
	p->icmp_error = 1;
	p->key.proto = q->ip.proto;
	p->key.t.src = addr_v4mapped(q->ip.dst);
	p->key.t.sport = q->dport;
	p->key.t.dport = q->sport;
	p->quoted_len = bpf_ntohs(q->ip.len);
	if (p->mtu)
		parse_quote_tunnel(data, end, p, L4(p) + sizeof(struct icmphdr) + sizeof(q->ip));
}

static __always_inline void parse_quote_v6(void *data, void *end, struct pkt *p)
{
	struct quote {
		struct ip6hdr ip;
		__be16 sport, dport;
		__be32 more;
	} *q = data + L4(p) + sizeof(struct icmphdr);

	if ((void *)(q + 1) > end || !addr_equal(q->ip.src.w, p->key.t.dst.w) || addr_is_v4((struct addr *)&q->ip.dst))
		return;
	p->icmp_error = 1;
	p->key.proto = q->ip.next;
	__builtin_memcpy(&p->key.t.src, &q->ip.dst, sizeof(p->key.t.src));
	p->key.t.sport = q->dport;
	p->key.t.dport = q->sport;
	p->quoted_len = bpf_ntohs(q->ip.len) + sizeof(q->ip);
	if (p->mtu)
		parse_quote_tunnel(data, end, p, L4(p) + sizeof(struct icmphdr) + sizeof(q->ip));
}

static __always_inline enum reason parse_icmp(void *data, void *end, struct pkt *p, __u32 room)
{
	struct icmphdr *icmp = data + L4(p);

	if ((void *)(icmp + 1) > end || room < sizeof(*icmp))
		return REASON_MALFORMED;
	p->icmp_type = icmp->type;
	if (p->fragment)
		return REASON_NONE;
	if (p->v6 && icmp->type > 0 && icmp->type <= ICMP6_PARAMETER) {
		if (icmp->type == ICMP6_TOO_BIG)
			p->mtu = bpf_ntohl(icmp->rest) ?: 1;
		parse_quote_v6(data, end, p);
	} else if (!p->v6 && (icmp->type == ICMP_UNREACHABLE || icmp->type == ICMP_TIME_EXCEEDED ||
			      icmp->type == ICMP_PARAMETER)) {
		if (icmp->type == ICMP_UNREACHABLE && icmp->code == ICMP_FRAG_NEEDED)
			p->mtu = (bpf_ntohl(icmp->rest) & 0xffff) ?: 1; /* 0: from a router that predates RFC 1191 */
		parse_quote_v4(data, end, p);
	}
	return REASON_NONE;
}

#define TCPOPT_END 0
#define TCPOPT_NOP 1
#define TCPOPT_TIMESTAMP 8

/* parse_timestamp returns a segment's timestamp. It checks only where Linux, BSD, macOS and Windows put the option,
 * because a loop over the options would be most of the verifier's work. */
static __always_inline __u32 parse_timestamp(const struct tcphdr *tcp, void *end)
{
	const struct option {
		__u8 kind, len;
		__be16 val[2];
	} * o;

	for (int at = 2; at <= 10; at += 4) {
		o = (void *)(tcp + 1) + at;
		if ((tcp->off >> 4) * 4 < (int)sizeof(*tcp) + at + 10 || (void *)(o + 1) > end)
			return 0;
		if (o->kind == TCPOPT_TIMESTAMP && o->len == 10)
			return (__u32)bpf_ntohs(o->val[0]) << 16 | bpf_ntohs(o->val[1]);
	}
	return 0;
}

static __always_inline enum reason parse_l4(void *data, void *end, struct pkt *p)
{
	void *l4 = data + L4(p);
	__u32 room = p->l3 + p->l3len > p->l4 ? p->l3 + p->l3len - p->l4 : 0;

	if (p->key.proto == IPPROTO_TCP) {
		struct tcphdr *tcp = l4;

		if (l4 + sizeof(*tcp) > end || room < sizeof(*tcp) || (tcp->off >> 4) * 4 < (int)sizeof(*tcp) ||
		    (__u32)(tcp->off >> 4) * 4 > room)
			return REASON_MALFORMED;
		p->key.t.sport = tcp->sport;
		p->key.t.dport = tcp->dport;
		p->seq = bpf_ntohl(tcp->seq);
		p->ack = bpf_ntohl(tcp->ack);
		p->flags = tcp->flags;
		p->payload = room - (tcp->off >> 4) * 4;
		if (p->flags & (TCP_SYN | TCP_FIN))
			p->tsval = parse_timestamp(tcp, end);
	} else if (p->key.proto == IPPROTO_UDP) {
		struct udphdr *udp = l4;

		if (l4 + sizeof(*udp) > end || room < sizeof(*udp))
			return REASON_MALFORMED;
		p->key.t.sport = udp->sport;
		p->key.t.dport = udp->dport;
	} else if (p->key.proto == IPPROTO_SCTP) {
		return parse_sctp(l4, end, p, room);
	} else if (p->key.proto == (p->v6 ? IPPROTO_ICMPV6 : IPPROTO_ICMP)) {
		return parse_icmp(data, end, p, room);
	}
	return REASON_NONE;
}

/* parse_l2 finds the IP header after at most two VLAN tags. */
static __always_inline __be16 parse_l2(void *data, void *end, struct pkt *p)
{
	struct ethhdr *eth = data;

	if ((void *)(eth + 1) > end)
		return 0;
	__be16 proto = eth->proto;

	p->l3 = sizeof(*eth);
	for (int i = 0; i < 2; i++) {
		struct vlan *tag = data + L3(p);

		if (proto != bpf_htons(ETH_P_8021Q) && proto != bpf_htons(ETH_P_8021AD))
			break;
		if ((void *)(tag + 1) > end)
			return 0;
		proto = tag->proto;
		p->l3 += sizeof(*tag);
	}
	return proto;
}

/* parse_l3 reads the IP header. It returns REASON_NOT_OURS if the frame is not IP. A malformed packet may be for
 * another destination, so the caller passes it to the stack unless the destination is a VIP. */
static __always_inline enum reason parse_l3(void *data, void *end, struct pkt *p)
{
	__be16 proto = parse_l2(data, end, p);

	if (proto == bpf_htons(ETH_P_IP))
		return parse_v4(data, end, p);
	return proto == bpf_htons(ETH_P_IPV6) ? parse_v6(data, end, p) : REASON_NOT_OURS;
}
