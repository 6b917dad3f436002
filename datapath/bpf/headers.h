/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/* Wire formats, so that only what BPF itself needs comes from outside. */
#pragma once
#include <linux/types.h>

#define ETH_ALEN 6
#define ETH_P_IP 0x0800
#define ETH_P_IPV6 0x86dd
#define IPPROTO_HOPOPTS 0
#define IPPROTO_ICMP 1
#define IPPROTO_TCP 6
#define IPPROTO_UDP 17
#define IPPROTO_ROUTING 43
#define IPPROTO_FRAGMENT 44
#define IPPROTO_ICMPV6 58
#define IPPROTO_DSTOPTS 60
#define AF_INET 2
#define AF_INET6 10

struct ethhdr {
	__u8 dst[ETH_ALEN], src[ETH_ALEN];
	__be16 proto;
} __attribute__((packed));

struct iphdr { /* RFC 791 */
	__u8 ver_ihl, tos;
	__be16 len, id, frag;
	__u8 ttl, proto;
	__sum16 csum;
	__be32 src, dst;
};

#define IP_MF 0x2000
#define IP_OFFSET 0x1fff

struct ip6hdr { /* RFC 8200 */
	__be32 ver_class_label;
	__be16 len;
	__u8 next, hops;
	struct in6 {
		__u32 w[4];
	} src, dst;
};

struct ip6ext { /* RFC 8200, 4.3, 4.4, 4.6 */
	__u8 next, len;
};

struct tcphdr { /* RFC 9293 */
	__be16 sport, dport;
	__be32 seq, ack;
	__u8 off, flags;
	__be16 window;
	__sum16 csum;
	__be16 urgent;
};

#define TCP_FIN 1
#define TCP_SYN 2
#define TCP_RST 4
#define TCP_ACK 16

struct udphdr { /* RFC 768 */
	__be16 sport, dport, len;
	__sum16 csum;
};

struct icmphdr { /* RFC 792, RFC 4443 */
	__u8 type, code;
	__sum16 csum;
	__be32 rest;
};

#define ICMP_ECHO_REPLY 0
#define ICMP_UNREACHABLE 3
#define ICMP_PORT 3
#define ICMP_ECHO 8
#define ICMP6_UNREACHABLE 1
#define ICMP6_PORT 4
#define ICMP6_ECHO 128
#define ICMP6_ECHO_REPLY 129
#define ND_FIRST 133 /* router solicitation … */
#define ND_LAST 137 /* … redirect (RFC 4861) */

/* Verdicts of tc (linux/pkt_cls.h). */
#define TC_ACT_UNSPEC (-1)
#define TC_ACT_SHOT 2
