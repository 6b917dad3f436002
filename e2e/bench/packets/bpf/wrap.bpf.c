// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause
//go:build ignore
/* BPF_PROG_TEST_RUN with repeat passes a program the packet that the program changed before. So these programs restore
 * the packet, give it the addresses of the next flow, and tail-call the measured program. They can also record the
 * packet that results, to generate packets in the other direction. */
#include <linux/bpf.h>
#include <bpf/bpf_endian.h>
#include <bpf/bpf_helpers.h>
#include "headers.h"

#define TC_ACT_UNSPEC (-1)
#define FRAME_MAX 128

enum vary {
	VARY_NONE,
	VARY_CLIENT, /* the flow number determines the client's address and port */
	VARY_SERVER, /* the same at the packet's other end, from server to client */
	VARY_RECORDED, /* the packet answers a recorded one */
};

/* Addresses and ports of a recorded packet. */
struct recorded {
	__be32 src, dst;
	__be16 sport, dport;
	__u32 pad;
};

volatile const __u64 frame[FRAME_MAX / 8]; /* the packet */
volatile const __u32 frame_words; /* words to restore; the programs do not change the rest */
volatile const __u32 frame_len;
volatile const __u32 ip_at; /* offset of the IP header whose addresses vary */
volatile const __u32 csum_at; /* offset of the checksum in the TCP or UDP header */
volatile const __u32 vary;
volatile const __u8 is_v6, record;
volatile const __u32 services; /* if more than 1, the flows use this many VIPs, starting at the packet's */

/* The n-th packet belongs to flow (base + n % (within + 1)) * stride % (mask + 1). */
__u32 base, within, stride, mask, n;
__u32 last; /* flow number of the previous packet */

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__type(key, __u32);
	__type(value, struct recorded);
	__uint(max_entries, 1);
	__uint(map_flags, BPF_F_MMAPABLE);
} recorded SEC(".maps");

/* The measured program. An array holds programs of one type. */
struct measured {
	__uint(type, BPF_MAP_TYPE_PROG_ARRAY);
	__uint(key_size, sizeof(__u32));
	__uint(value_size, sizeof(__u32));
	__uint(max_entries, 1);
};

struct measured measured_xdp SEC(".maps");
struct measured measured_tc SEC(".maps");

struct v4 {
	struct iphdr ip;
	__be16 sport, dport;
};

struct v6 {
	struct ip6hdr ip;
	__be16 sport, dport;
};

static __always_inline void save(void *data, void *end)
{
	struct v4 *p = data + sizeof(struct ethhdr);
	struct recorded *r = bpf_map_lookup_elem(&recorded, &last);

	if (!r || (void *)(p + 1) > end)
		return;
	r->src = p->ip.src;
	r->dst = p->ip.dst;
	r->sport = p->sport;
	r->dport = p->dport;
}

static __always_inline __u32 fold(__u32 sum)
{
	sum = (sum & 0xffff) + (sum >> 16);
	return (sum & 0xffff) + (sum >> 16);
}

static __always_inline __u32 sum_addrs(const struct v4 *p)
{
	return fold((p->ip.src & 0xffff) + (p->ip.src >> 16) + (p->ip.dst & 0xffff) + (p->ip.dst >> 16));
}

/* csum_replace updates a checksum after a partial sum changed from before to after (RFC 1624). */
static __always_inline void csum_replace(__sum16 *csum, __u32 before, __u32 after)
{
	*csum = ~fold((~*csum & 0xffff) + (~before & 0xffff) + after);
}

static __always_inline void set_addrs_v4(struct v4 *p, __u32 flow)
{
	__be32 addr = bpf_htonl(0x0a000000 + (flow >> 4));
	__be16 port = bpf_htons(1024 + (flow & 15));
	struct recorded *r;

	switch (vary) {
	case VARY_CLIENT:
		p->ip.src = addr;
		p->sport = port;
		if (services > 1)
			p->ip.dst = bpf_htonl(bpf_ntohl(p->ip.dst) + ((flow & 0xffff) * services >> 16));
		break;
	case VARY_SERVER:
		p->ip.dst = addr;
		p->dport = port;
		break;
	case VARY_RECORDED:
		r = bpf_map_lookup_elem(&recorded, &flow);
		if (!r)
			break;
		p->ip.src = r->dst;
		p->ip.dst = r->src;
		p->sport = r->dport;
		p->dport = r->sport;
	}
}

static __always_inline int vary_v4(struct v4 *p, void *end, __u32 flow)
{
	__sum16 *csum = (void *)&p->sport + (csum_at & 31);

	if ((void *)(csum + 1) > end)
		return 0;
	__u32 addrs = sum_addrs(p), all = fold(addrs + p->sport + p->dport);

	set_addrs_v4(p, flow);
	csum_replace(&p->ip.csum, addrs, sum_addrs(p));
	csum_replace(csum, all, fold(sum_addrs(p) + p->sport + p->dport));
	return 1;
}

/* restore copies word by word. frame_words is constant, so the verifier knows where the loop ends. */
static __always_inline int restore(void *data, void *end)
{
	__u64 *to = data;
	__u32 flow = (base + (n++ & within)) * stride & mask;

	last = flow;
	for (int i = 0; i < FRAME_MAX / 8; i++) {
		if (i >= frame_words)
			break;
		if ((void *)(to + i + 1) > end)
			return 0;
		to[i] = frame[i];
	}
	if (vary == VARY_NONE)
		return 1;
	if (is_v6) {
		struct v6 *p = data + (ip_at & 127);

		if ((void *)(p + 1) > end)
			return 0;
		p->ip.src.w[3] = bpf_htonl(0x0a000000 + (flow >> 4));
		p->sport = bpf_htons(1024 + (flow & 15));
		return 1;
	}
	struct v4 *p = data + (ip_at & 127);

	if ((void *)(p + 1) > end)
		return 0;
	return vary_v4(p, end, flow);
}

SEC("xdp")
int wrap_xdp(struct xdp_md *ctx)
{
	int grown = (void *)(long)ctx->data_end - (void *)(long)ctx->data - frame_len;

	if (record)
		save((void *)(long)ctx->data, (void *)(long)ctx->data_end);
	if (grown && bpf_xdp_adjust_head(ctx, grown))
		return XDP_ABORTED;
	if (restore((void *)(long)ctx->data, (void *)(long)ctx->data_end))
		bpf_tail_call(ctx, &measured_xdp, 0);
	return XDP_ABORTED;
}

SEC("tc")
int wrap_tc(struct __sk_buff *skb)
{
	int missing = frame_len - skb->len;

	if (record)
		save((void *)(long)skb->data, (void *)(long)skb->data_end);
	if (missing && bpf_skb_adjust_room(skb, missing, BPF_ADJ_ROOM_MAC, BPF_F_ADJ_ROOM_FIXED_GSO))
		return -2;
	if (restore((void *)(long)skb->data, (void *)(long)skb->data_end))
		bpf_tail_call(skb, &measured_tc, 0);
	return -2;
}

/* Sends packets: BPF_PROG_TEST_RUN with live frames runs it. */
SEC("xdp")
int source_xdp(struct xdp_md *ctx)
{
	return restore((void *)(long)ctx->data, (void *)(long)ctx->data_end) ? XDP_TX : XDP_ABORTED;
}

/* Measures the cost of the wrapper itself. */
SEC("xdp")
int null_xdp(struct xdp_md *ctx)
{
	return XDP_TX;
}

SEC("tc")
int null_tc(struct __sk_buff *skb)
{
	return TC_ACT_UNSPEC;
}

char _license[] SEC("license") = "Dual BSD/GPL";
