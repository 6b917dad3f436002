/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/* Wire formats, defined here so that only BPF's own headers are needed. */
#pragma once
#include <linux/types.h>
#include <bpf/bpf_helpers.h>

#define ETH_ALEN 6
#define ETH_P_IP 0x0800
#define ETH_P_IPV6 0x86dd
#define ETH_P_8021Q 0x8100
#define ETH_P_8021AD 0x88a8
#define IPPROTO_HOPOPTS 0
#define IPPROTO_ICMP 1
#define IPPROTO_IPIP 4
#define IPPROTO_TCP 6
#define IPPROTO_UDP 17
#define IPPROTO_IPV6 41
#define IPPROTO_ROUTING 43
#define IPPROTO_FRAGMENT 44
#define IPPROTO_ICMPV6 58
#define IPPROTO_DSTOPTS 60
#define IPPROTO_SCTP 132
#define AF_INET 2
#define AF_INET6 10
#define EALREADY 114

struct ethhdr {
	__u8 dst[ETH_ALEN], src[ETH_ALEN];
	__be16 proto;
} __attribute__((packed));

/* Frames are aligned to 2 bytes, which the compiler does not know. It would copy byte by byte. */
static __always_inline void mac_copy(void *to, const void *from)
{
	for (int i = 0; i < ETH_ALEN / 2; i++)
		((__u16 *)to)[i] = ((const __u16 *)from)[i];
}

struct vlan { /* IEEE 802.1Q, starting after the first protocol field */
	__be16 tci, proto;
};

struct iphdr { /* RFC 791 */
	__u8 ver_ihl, tos;
	__be16 len, id, frag;
	__u8 ttl, proto;
	__sum16 csum;
	__be32 src, dst;
};

/* Explicit congestion notification: the low bits of tos (RFC 3168, 5). */
#define ECN_MASK 3
#define ECN_NOT_ECT 0
#define ECN_CE 3

#define IP_DF 0x4000
#define IP_MF 0x2000
#define IP_OFFSET 0x1fff

struct ip6hdr { /* RFC 8200 */
	__be32 ver_class_label;
	__be16 len;
	__u8 next, hop_limit;
	struct in6 {
		__u32 w[4];
	} src, dst;
};

struct ip6ext { /* RFC 8200, 4.3, 4.4, 4.6 */
	__u8 next, len;
};

struct ip6frag { /* RFC 8200, 4.5 */
	__u8 next, reserved;
	__be16 frag;
	__be32 id;
};

#define IP6_OFFSET 0xfff8

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

struct sctphdr { /* RFC 9260, 3.1, 3.2, with the first field of INIT and INIT ACK */
	__be16 sport, dport;
	__be32 vtag, csum;
	__u8 chunk, flags;
	__be16 len;
};

#define SCTP_INIT 1
#define SCTP_INIT_ACK 2
#define SCTP_ABORT 6
#define SCTP_SHUTDOWN 7
#define SCTP_SHUTDOWN_ACK 8
#define SCTP_ERROR 9
#define SCTP_SHUTDOWN_COMPLETE 14

struct guehdr { /* version 0, no flags */
	__u8 version_len, proto;
	__be16 flags;
};

struct icmphdr { /* RFC 792, RFC 4443 */
	__u8 type, code;
	__sum16 csum;
	__be32 rest;
};

#define ICMP_ECHO_REPLY 0
#define ICMP_UNREACHABLE 3
#define ICMP_PORT 3
#define ICMP_FRAG_NEEDED 4
#define ICMP_TIME_EXCEEDED 11
#define ICMP_PARAMETER 12
#define ICMP_ECHO 8
#define ICMP6_UNREACHABLE 1
#define ICMP6_PORT 4
#define ICMP6_TOO_BIG 2
#define ICMP6_PARAMETER 4 /* the last error type */
#define ICMP6_ECHO 128
#define ICMP6_ECHO_REPLY 129
#define ND_FIRST 133 /* router solicitation … */
#define ND_LAST 137 /* … redirect (RFC 4861) */

/* Number of bytes of a packet that must be linear for parsing, usually and with the longest supported extension
 * headers. */
#define HEADERS_MAX 256
#define HEADERS_LONG 640

#define PACKET_HOST 0 /* linux/if_packet.h */

/* Return codes of tc (linux/pkt_cls.h). */
#define TC_ACT_UNSPEC (-1)
#define TC_ACT_SHOT 2
