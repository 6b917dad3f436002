/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/* Answers on behalf of a VIP: echo replies, TCP resets, ICMP errors. They leave by the ingress interface. */
#pragma once
#include "decide.h"
#include "rewrite.h"

/* tcp_reset_header returns the RST for a packet without a flow (RFC 9293, 3.10.7.1), without a checksum. */
static __always_inline struct tcphdr tcp_reset_header(const struct pkt *p)
{
	struct tcphdr tcp = { .sport = p->key.t.dport, .dport = p->key.t.sport, .off = 5 << 4, .flags = TCP_RST };

	if (p->flags & TCP_ACK) {
		tcp.seq = bpf_htonl(p->ack);
		return tcp;
	}
	tcp.flags |= TCP_ACK;
	tcp.ack = bpf_htonl(p->seq + p->payload + ((p->flags & TCP_SYN) != 0) + ((p->flags & TCP_FIN) != 0));
	return tcp;
}

/* Number of bytes after the IP header that an ICMP error quotes, enough for the ports (the minimum of RFC 792). With
 * IPv6 a fragment header may precede them. */
#define QUOTE 8
#define QUOTE_LONG 16

struct error4 {
	struct icmphdr icmp;
	struct iphdr ip;
	__u8 quote[QUOTE];
};

struct error6 {
	struct icmphdr icmp;
	struct ip6hdr ip;
	__u8 quote[QUOTE_LONG];
};

/* icmp_strip_extensions makes the answer start right after the IPv6 header. It returns the number of bytes to quote. */
static __always_inline __u32 icmp_strip_extensions(struct pkt *p)
{
	__u32 bare = p->l3 + sizeof(struct ip6hdr), quote = p->l4 == bare ? QUOTE : QUOTE_LONG;

	p->l4 = bare;
	return quote;
}

/* icmp_error_header returns a verdict's ICMP header: port unreachable, or packet too big with the MTU. */
static __always_inline struct icmphdr icmp_error_header(const struct pkt *p, const struct verdict *v)
{
	struct icmphdr icmp = {};

	if (v->action == ACTION_TOO_BIG) {
		icmp.type = p->v6 ? ICMP6_TOO_BIG : ICMP_UNREACHABLE;
		icmp.code = p->v6 ? 0 : ICMP_FRAG_NEEDED;
		icmp.rest = bpf_htonl(v->mtu);
	} else {
		icmp.type = p->v6 ? ICMP6_UNREACHABLE : ICMP_UNREACHABLE;
		icmp.code = p->v6 ? ICMP6_PORT : ICMP_PORT;
	}
	return icmp;
}

/* icmp_echo_reply turns an echo request into its reply in place. Swapping the addresses of the pseudo-header does not
 * change the checksum; changing the type does. */
static __always_inline int icmp_echo_reply(void *data, void *end, const struct pkt *p)
{
	__u16 len = p->l3 + p->l3len - p->l4;

	if (!rewrite_to_answer(data, end, p, len, p->key.proto))
		return 0;
	struct icmphdr *icmp = data + L4(p);

	if ((void *)(icmp + 1) > end)
		return 0;
	__be32 from = bpf_htonl((__u32)icmp->type << 24), to;

	icmp->type = p->v6 ? ICMP6_ECHO_REPLY : ICMP_ECHO_REPLY;
	to = bpf_htonl((__u32)icmp->type << 24);
	icmp->csum = ~csum_fold(bpf_csum_diff(&from, 4, &to, 4, (__u16)~icmp->csum));
	return 1;
}

/* Kinds of answers with separate rate limits: refusals; packet too big, without which connections hang; and resets
 * because of a fault of this node, which may last. */
enum answer_kind {
	ANSWER_REFUSAL,
	ANSWER_TOO_BIG,
	ANSWER_FAULT,
	ANSWER_UNLIMITED,
};

static __always_inline enum answer_kind answer_kind(const struct verdict *v)
{
	if (v->action == ACTION_RESET)
		return v->reason == REASON_SNAT_EXHAUSTED || v->reason == REASON_FLOWS_FULL ||
				       v->reason == REASON_NO_ROUTE ?
			       ANSWER_FAULT :
			       ANSWER_UNLIMITED;
	return v->action == ACTION_REFUSE  ? ANSWER_REFUSAL :
	       v->action == ACTION_TOO_BIG ? ANSWER_TOO_BIG :
					     ANSWER_UNLIMITED;
}

/* answer_ratelimit takes a token from this CPU's bucket for the kind of answer. If there is none, the verdict becomes a
 * drop. It also becomes a drop for IPv4 packets with options, which act_error4 does not quote. It is a global function,
 * so its stack is in use only while it runs. */
__noinline int answer_ratelimit(void)
{
	struct scratch *s = scratch_get();

	if (!s)
		return 0;
	const struct pkt *p = &s->p;
	struct verdict *v = &s->v;
	__u32 kind = answer_kind(v);

	if (kind == ANSWER_UNLIMITED)
		return 0;
	if (kind != ANSWER_FAULT && !p->v6 && p->l4 != p->l3 + sizeof(struct iphdr)) {
		v->action = ACTION_DROP;
		return 0;
	}
	struct token_bucket *b = bpf_map_lookup_elem(&sy_answer_rate, &kind);
	__u64 now = bpf_ktime_get_coarse_ns();

	if (b && now - b->refilled > SECOND / 10) {
		b->refilled = now;
		b->tokens += answers_per_second / 10;
		if (b->tokens > answers_per_second)
			b->tokens = answers_per_second;
	}
	if (b && b->tokens) {
		b->tokens--;
		return 0;
	}
	v->action = ACTION_DROP;
	if (kind != ANSWER_FAULT)
		v->reason = REASON_ICMP_RATELIMITED;
	return 0;
}
