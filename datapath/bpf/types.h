/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/* Types shared with Go through bpf2go. No unions and no implicit padding: every byte has a name and one meaning. */
#pragma once
#include <linux/types.h>

/* IPv4 is carried as ::ffff:a.b.c.d (RFC 4291, 2.5.5.2), so there is one path for both families. */
struct addr {
	__u32 w[4];
};

/* What a flow is told by; 36 bytes, the same layout wherever checksums are taken over it. */
struct tuple {
	struct addr src, dst;
	__be16 sport, dport;
};

struct frontend_key {
	struct addr vip;
	__be16 port;
	__u8 proto; /* IPPROTO_* */
	__u8 pad;
};

enum method { METHOD_NAT = 1 };

/* What to take a slot of the table by. */
enum spread {
	SPREAD_FLOW = 1, /* hash of the tuple */
	SPREAD_SOURCE, /* hash of the client's address */
	SPREAD_RANDOM,
	SPREAD_TURNS, /* each new flow the next slot, per CPU */
};

struct frontend {
	__u32 id;
	__u8 method; /* enum method */
	__u8 spread; /* enum spread */
	__u8 pad[2];
};

struct backend {
	struct addr addr;
	struct addr snat; /* our address towards it */
	__be16 port;
	__u16 pad;
};

struct vip {
	__u32 up; /* 1: some frontend of it can serve; then it answers ping */
};

struct flow_key {
	struct tuple t; /* as the packet arrives */
	__u8 proto;
	__u8 pad[3];
};

enum flow_state {
	FLOW_HALF_OPEN = 1, /* the client has not proved that it is there */
	FLOW_ESTABLISHED,
	FLOW_CLOSING, /* one side has said FIN */
	FLOW_CLOSED, /* both have, or one has said RST */
};

/* One direction of a flow. The entry of the other direction is found under the reverse of t. */
struct flow {
	struct tuple t; /* what the packet becomes */
	/* From the client: half-open, the first sequence number of the server; then the last ACK of the client, which is
	 * where a RST to it must start. */
	__u32 seq;
	__u32 frontend, backend; /* ids */
	__u8 state; /* enum flow_state */
	__u8 reply; /* 1: this is the direction from the server */
	__u8 answered; /* 1: the server has answered; only in the client's direction */
	__u8 fin; /* 1: this side has said FIN */
	__u32 pad;
	__u64 seen; /* last packet, CLOCK_MONOTONIC (coarse) ns */
};

struct traffic {
	__u64 packets, bytes; /* both directions, as received */
	__u64 flows; /* opened */
};

/* The only list of reasons: names in metrics, tests and documents are made from it. Each says who must act. */
enum reason {
	REASON_NONE,
	REASON_NOT_OURS, /* nobody: not for an address of ours */
	REASON_FORWARDED, /* nobody */
	REASON_ECHO, /* nobody: ping answered */
	REASON_NEIGHBOUR, /* nobody: neighbour discovery, for the stack */
	REASON_MALFORMED, /* sender: headers that end too early */
	REASON_FRAGMENT, /* this version: fragments are not followed yet */
	REASON_NO_FRONTEND, /* client: nobody serves this port */
	REASON_PROTOCOL, /* client: neither TCP, UDP nor echo */
	REASON_VIP_DOWN, /* operator: ping to an address without a usable backend */
	REASON_NO_BACKEND, /* operator: no backend may take new flows */
	REASON_NO_FLOW, /* client: goes on with a flow that we do not know, or no longer */
	REASON_BAD_ACK, /* client: acknowledges what the server never sent */
	REASON_FLOWS_FULL, /* operator: raise max_flows */
	REASON_SNAT_FULL, /* operator: more snat_ports or more backends */
	REASON_NO_ROUTE, /* operator: the kernel has no route to where it goes */
	REASON_NO_FORWARDING, /* operator: something turned the forwarding sysctl off */
	REASON_TTL, /* sender: loops, or starts with too small a TTL */
	REASON_TOO_BIG, /* operator: MTU towards the receiver is smaller than the packet */
	REASON_INTERNAL, /* us: a helper failed that does not fail */
	REASON_MAX,
};

enum action {
	ACTION_PASS, /* to the stack, untouched */
	ACTION_DROP,
	ACTION_FORWARD, /* rewritten to verdict.t */
	ACTION_ECHO, /* answer the ping */
	ACTION_RESET, /* answer with a TCP RST */
	ACTION_REFUSE, /* answer with ICMP port unreachable */
	ACTION_MAX,
};

/* What commit has to write when the packet is really sent. */
enum commit {
	COMMIT_NONE,
	COMMIT_TOUCH, /* the flow was seen */
	COMMIT_OPEN, /* new half-open flow, with a source port of ours */
	COMMIT_ANSWER, /* the server answered a half-open flow */
	COMMIT_PROVE, /* the client proved itself: half-open becomes established */
	COMMIT_CLOSE, /* FIN or RST */
};

struct verdict {
	struct tuple t;
	enum action action;
	enum reason reason;
	enum commit commit;
	__u32 frontend, backend; /* ids, when counted is 1 */
	__u8 counted; /* 1: frontend is valid; 2: backend too */
	__u8 half; /* 1: the flow is in halfopen */
	__u8 pad[2];
};
