/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
#pragma once
#include "types.h"

/* The loader sets these. The verifier removes branches that they make unreachable. */
#define SNAT_RANGES 8
volatile const __u16 snat_first[SNAT_RANGES] = { 61000 }, snat_last[SNAT_RANGES] = { 65535 }; /* the rest is zero */
volatile const __u32 snat_ports = 4536; /* total number in all ranges */
volatile const __u32 udp_flows = 1024; /* max_entries of sy_udp_servers */
volatile const __u32 stream_place_lines = 0, udp_place_lines = 0; /* max_entries of sy_*_places */
volatile const __u16 tunnel_port = 6090;
volatile const __u8 tunnel_decap = 0; /* 1: tunnels may end on this node */

volatile const __u8 local_delivery = 0; /* 1: backends may be on this node */

/* 1: use bpf_redirect instead of XDP_TX. On veth, XDP_TX does not wake a peer without an XDP program (veth_xdp_flush in
 * drivers/net/veth.c), so packets would wait for the next one. */
volatile const __u8 no_xdp_tx = 0;

/* Keys of flow_hash, derived from Options.HashSeed. All balancers that share VIPs have the same keys. */
volatile const __u32 hash_keys[10] = {};

volatile const __u64 host_netns = 0; /* cookie of the network namespace whose connections sock.h balances */
volatile const __u8 sock_refuses = 0; /* 1: this kernel has bpf_set_retval */

volatile const __u8 xdp_frags = 0; /* 1: sy_xdp receives frames in several buffers, because an MTU exceeds 1500 */

#define SECOND 1000000000ULL
/* Idle timeouts, similar to nf_conntrack's and RFC 5382's. Go has them as well. */
volatile const __u64 timeout_half_open = 30 * SECOND;
volatile const __u64 timeout_established = 7800 * SECOND; /* RFC 5382, REQ-5: at least 2 h 4 min */
volatile const __u64 timeout_closing = 240 * SECOND; /* RFC 5382, REQ-5: transitory, 4 min */
volatile const __u64 timeout_closed = 10 * SECOND; /* for packets still in flight */
/* How long the side that sent FIN first rejects a new connection from the same port. Linux does so for 60 s
 * (TCP_TIMEWAIT_LEN). */
volatile const __u64 timeout_time_wait = 65 * SECOND;
volatile const __u64 timeout_udp = 180 * SECOND; /* RFC 4787, REQ-5: at least 2 min */

/* Rate limit for answers of each kind, per CPU, similar to Linux's icmp_msgs_per_sec and icmp_msgs_burst. */
volatile const __u32 answers_per_second = 1000;

/* The minimum MTU of IPv6 (RFC 8200, 5). Smaller reported MTUs are ignored, and smaller packets are not checked. */
#define MIN_MTU 1280

/* Types that Go reads from BTF but no map uses. Their layout does not matter. */
#pragma clang diagnostic push
#pragma clang diagnostic ignored "-Wpadded"
volatile const struct exported {
	struct traffic traffic;
	struct verdict verdict;
	struct explained explained;
	enum flow_state flow_state;
	enum fin fin;
	enum flow_doubt flow_doubt;
	enum method method;
	enum algorithm algorithm;
	enum addr_kind addr_kind;
	enum gc_table gc_table;
	struct gc_list gc_list;
	struct slot_line slot_line;
	struct handshakes handshakes;
	struct backend backend;
} exported = {};
#pragma clang diagnostic pop
