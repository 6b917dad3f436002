/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
#pragma once
#include "types.h"

/* Set by the loader; the verifier prunes what they make unreachable. */
volatile const __u16 snat_first = 61000, snat_last = 65535;
volatile const __u16 tunnel_port = 6090;
volatile const __u8 tunnel_end = 0; /* 1: tunnels may end here */

volatile const __u8 delivers = 0; /* 1: backends may be on this machine */

/* 1: send by redirect also where XDP_TX would do. veth's XDP_TX does not wake up a peer that has no XDP program itself
 * (veth_xdp_flush in drivers/net/veth.c): packets then wait for the next one. */
volatile const __u8 no_xdp_tx = 0;

#define SECOND 1000000000ULL
/* How long a flow may be silent (nf_conntrack's and RFC 5382's values are of this order). Read by Go, too. */
volatile const __u64 timeout_half_open = 30 * SECOND;
volatile const __u64 timeout_established = 7800 * SECOND; /* RFC 5382, REQ-5: at least 2 h 4 min */
volatile const __u64 timeout_closing = 240 * SECOND; /* RFC 5382, REQ-5: transitory, 4 min */
volatile const __u64 timeout_closed = 10 * SECOND; /* for what was still on its way */
volatile const __u64 timeout_udp = 180 * SECOND; /* RFC 4787, REQ-5: at least 2 min */

/* ICMP errors that one CPU sends at most (Linux's own icmp_msgs_per_sec and icmp_msgs_burst are of this order). */
volatile const __u32 answers_per_second = 1000;

/* What no IPv6 link is smaller than (RFC 8200, 5): smaller claims are not believed, and smaller packets not measured. */
#define MIN_MTU 1280

/* Types that no map has, and that Go reads from the object's type information. */
volatile const struct exported {
	struct verdict verdict;
	enum flow_state flow_state;
	enum method method;
	enum spread spread;
	struct slot slot;
	struct traffic traffic;
} exported = {};
