// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause
//go:build ignore
/* The minimum work of a load balancer, as a baseline for the datapath's programs. Each program adds one step. */
#include <linux/bpf.h>
#include <bpf/bpf_endian.h>
#include <bpf/bpf_helpers.h>
#include "headers.h"

struct tcp_ports {
	__be16 src, dst;
};

struct headers {
	struct ethhdr eth;
	struct iphdr ip;
	struct tcp_ports l4;
} __attribute__((packed));

struct floor_vip {
	__be32 addr;
	__be16 port;
	__u8 proto, pad;
};

struct floor_flow {
	__be32 src, dst;
	__be16 sport, dport;
	__u32 proto;
};

struct floor_backend {
	__be32 addr;
	__u8 mac[ETH_ALEN];
	__u8 pad[2];
};

#define SLOTS 65536
#define FLOWS (1 << 20)

struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__type(key, struct floor_vip);
	__type(value, __u32);
	__uint(max_entries, 1024);
} floor_vips SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__type(key, __u32);
	__type(value, __u32);
	__uint(max_entries, SLOTS);
} floor_slots SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__type(key, __u32);
	__type(value, struct floor_backend);
	__uint(max_entries, 256);
} floor_backends SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_LRU_HASH);
	__type(key, struct floor_flow);
	__type(value, __u32);
	__uint(max_entries, FLOWS);
} floor_flows SEC(".maps");

static __always_inline struct headers *parse(struct xdp_md *ctx)
{
	struct headers *h = (void *)(long)ctx->data;

	if ((void *)(h + 1) > (void *)(long)ctx->data_end || h->eth.proto != bpf_htons(ETH_P_IP) ||
	    h->ip.ver_ihl != 0x45 || (h->ip.proto != IPPROTO_TCP && h->ip.proto != IPPROTO_UDP))
		return 0;
	return h;
}

static __always_inline int vip_known(const struct headers *h)
{
	struct floor_vip key = { .addr = h->ip.dst, .port = h->l4.dst, .proto = h->ip.proto };

	return bpf_map_lookup_elem(&floor_vips, &key) != 0;
}

static __always_inline __u32 mix(__u32 h, __u32 w)
{
	h ^= w * 0xcc9e2d51;
	h = (h << 13) | (h >> 19);
	return h * 5 + 0xe6546b64;
}

static __always_inline __u32 hash(const struct headers *h)
{
	__u32 x = mix(mix(mix(0, h->ip.src), h->ip.dst), (__u32)h->l4.src << 16 | h->l4.dst);

	x = (x ^ x >> 16) * 0x85ebca6b;
	return x ^ x >> 16;
}

static __always_inline struct floor_backend *backend(const struct headers *h)
{
	__u32 i = hash(h) & (SLOTS - 1), *b = bpf_map_lookup_elem(&floor_slots, &i);

	return b ? bpf_map_lookup_elem(&floor_backends, b) : 0;
}

static __always_inline __sum16 ip_checksum(const __u16 *w)
{
	__u32 sum = 0;

	for (int i = 0; i < (int)sizeof(struct iphdr) / 2; i++)
		sum += w[i];
	sum = (sum & 0xffff) + (sum >> 16);
	return ~((sum & 0xffff) + (sum >> 16));
}

static __always_inline int encapsulate(struct xdp_md *ctx, const struct floor_backend *b, __u16 len)
{
	if (bpf_xdp_adjust_head(ctx, -(int)sizeof(struct iphdr)))
		return XDP_DROP;

	struct headers *h = (void *)(long)ctx->data;
	struct ethhdr *old = (void *)h + sizeof(struct iphdr);

	if ((void *)(h + 1) > (void *)(long)ctx->data_end || (void *)(old + 1) > (void *)(long)ctx->data_end)
		return XDP_DROP;
	__builtin_memcpy(h->eth.src, old->dst, ETH_ALEN);
	__builtin_memcpy(h->eth.dst, b->mac, ETH_ALEN);
	h->eth.proto = bpf_htons(ETH_P_IP);
	struct iphdr outer = {
		.ver_ihl = 0x45,
		.len = bpf_htons(len + sizeof(struct iphdr)),
		.ttl = 64,
		.proto = IPPROTO_IPIP,
		.src = bpf_htonl(0xc0000201),
		.dst = b->addr,
	};
	outer.csum = ip_checksum((void *)&outer);
	h->ip = outer;
	return XDP_TX;
}

SEC("xdp")
int floor_tx(struct xdp_md *ctx)
{
	return XDP_TX;
}

SEC("xdp")
int floor_macs(struct xdp_md *ctx)
{
	struct headers *h = parse(ctx);
	__u8 mac[ETH_ALEN];

	if (!h)
		return XDP_DROP;
	__builtin_memcpy(mac, h->eth.dst, ETH_ALEN);
	__builtin_memcpy(h->eth.dst, h->eth.src, ETH_ALEN);
	__builtin_memcpy(h->eth.src, mac, ETH_ALEN);
	return XDP_TX;
}

/* The baseline, which looks up no flow. */
SEC("xdp")
int floor_ipip(struct xdp_md *ctx)
{
	struct headers *h = parse(ctx);
	struct floor_backend *b = h && vip_known(h) ? backend(h) : 0;

	return b ? encapsulate(ctx, b, bpf_ntohs(h->ip.len)) : XDP_DROP;
}

/* The baseline with one lookup in a flow table, and an insert if the flow is unknown. */
SEC("xdp")
int floor_lru(struct xdp_md *ctx)
{
	struct headers *h = parse(ctx);

	if (!h || !vip_known(h))
		return XDP_DROP;
	struct floor_flow key = {
		.src = h->ip.src, .dst = h->ip.dst, .sport = h->l4.src, .dport = h->l4.dst, .proto = h->ip.proto
	};
	__u32 *known = bpf_map_lookup_elem(&floor_flows, &key), i = hash(h) & 255;

	if (known)
		i = *known;
	else
		bpf_map_update_elem(&floor_flows, &key, &i, BPF_ANY);
	struct floor_backend *b = bpf_map_lookup_elem(&floor_backends, &i);

	return b ? encapsulate(ctx, b, bpf_ntohs(h->ip.len)) : XDP_DROP;
}

__u64 received;
__be32 received_dst; /* of the last packet */

/* Receives the packets that are sent. */
SEC("xdp")
int sink(struct xdp_md *ctx)
{
	struct headers *h = (void *)(long)ctx->data;

	if ((void *)(h + 1) > (void *)(long)ctx->data_end || h->eth.proto != bpf_htons(ETH_P_IP))
		return XDP_DROP;
	received_dst = h->ip.dst;
	__sync_fetch_and_add(&received, 1);
	return XDP_DROP;
}

char _license[] SEC("license") = "Dual BSD/GPL";
