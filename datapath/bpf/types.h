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
	__u8 inside; /* 1: what this machine does with packets that it is to deliver, of a chained frontend */
};

/* How packets get to a backend. All but METHOD_NAT are one-way: the server answers the client itself. */
enum method {
	METHOD_NAT = 1,
	METHOD_DSR, /* another destination MAC */
	METHOD_IPIP, /* RFC 2003, RFC 2473, RFC 4213 */
	METHOD_GUE, /* draft-ietf-intarea-gue, version 0 */
};

/* What to take a slot of the table by. */
enum spread {
	SPREAD_FLOW = 1, /* hash of the tuple */
	SPREAD_SOURCE, /* hash of the client's address */
	SPREAD_RANDOM,
	SPREAD_TURNS, /* each new flow the next slot, per CPU */
	SPREAD_LEAST, /* of a few random slots the one whose backend has the fewest flows for its weight */
};

struct frontend {
	__u32 id;
	__u8 method; /* enum method */
	__u8 spread; /* enum spread */
	__u8 restricted; /* 1: only sources in `allowed` may open flows */
	__u8 silent; /* 1: without a backend new flows are dropped and not refused */
	__be16 first; /* port of a range; a backend's port belongs to it */
	__u8 chained; /* 1: its backends are machines that do as this one does: flows are kept by who delivers them */
	__u8 pad;
	__u32 affinity; /* seconds that a client keeps its backend; 0: not at all */
};

/* A range of ports is in `ranges` as the prefixes that it consists of. */
struct range_key {
	__u32 prefix; /* bits of what follows */
	struct addr vip;
	__be16 proto; /* so that the port begins at a multiple of 16 bits */
	__be16 port;
};

#define RANGE_BITS (128 + 16) /* before the bits of the port */

struct allow_key {
	__u32 prefix; /* bits of what follows */
	__be32 frontend;
	struct addr source;
};

#define NO_BACKEND 0xffffffff
#define ANY_BACKEND 0xfffffffe

/* A slot remembers which backends it had before, the last one first: flows that were opened then may still go there. */
#define PREVIOUS 3
struct slot {
	__u32 backend; /* NO_BACKEND: it has none any more */
	__u32 previous[PREVIOUS]; /* NO_BACKEND: there are no more; ANY_BACKEND: see the slots of the old table */
};

/* Machines that may know the flow of a packet, in the order in which they are to be asked. It goes along with the packet. */
#define CHAIN 3
struct chain {
	struct addr next[CHAIN];
	__u8 n; /* of next */
	__u8 passed; /* 1: a machine that was to deliver the packet has passed it on */
	__u8 pad[2];
};

#define SNATS 4 /* a power of two */

struct backend {
	struct addr addr;
	struct addr snat[SNATS]; /* our addresses towards it, best first; the rest is zero */
	__be16 port;
	__u8 here; /* 1: on this machine: packets keep their source, and the stack delivers them */
	__u8 pad;
};

/* A backend that may get new flows of a frontend; only where affinity or weights must be asked for. */
struct member_key {
	__u32 frontend, backend;
};

struct affinity_key {
	struct addr client;
	__u32 frontend;
};

struct affinity {
	__u32 backend;
	__u32 pad;
	__u64 seen; /* last flow that was opened, CLOCK_MONOTONIC (coarse) ns */
};

/* The ports of a datagram whose first fragment we have seen. */
struct fragment_key {
	struct addr src, dst;
	__u32 id;
	__u32 proto;
};

struct fragment {
	__be16 sport, dport;
};

/* How large a packet to a backend may be, as a router on the way has told (RFC 1191, RFC 8201). */
struct path {
	__u64 seen;
	__u32 mtu;
	__u32 pad;
};

/* A packet of our own health checks, by its mark. */
struct probe {
	struct addr addr, local; /* of the server, and ours towards it */
	__u32 method;
	__u32 ifindex; /* of the interface towards it */
};

/* What one CPU may still answer with ICMP errors. */
struct bucket {
	__u64 filled; /* CLOCK_MONOTONIC (coarse) ns */
	__u64 left;
};

struct vip {
	__u8 up; /* 1: some frontend of it can serve; then it answers ping */
	__u8 ranges; /* 1: some frontend of it is in `ranges` */
	__u8 pad[2];
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
	__u8 method; /* enum method; a one-way flow has no other direction */
	__u8 here; /* 1: to a backend on this machine */
	__u8 pad[2];
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
	REASON_FORWARDED, /* nobody: to a backend, or back to a client */
	REASON_ECHO, /* nobody: ping answered */
	REASON_NEIGHBOUR, /* nobody: neighbour discovery, for the stack */
	REASON_TUNNELLED, /* nobody: came out of a tunnel, for the stack */
	REASON_PATH, /* nobody: a router told the MTU of the way to a backend */
	REASON_MALFORMED, /* sender: headers that end too early */
	REASON_FRAGMENT, /* nobody: a fragment that came before the first one of its datagram */
	REASON_NO_FRONTEND, /* client: nobody serves this port */
	REASON_PROTOCOL, /* client: neither TCP, UDP, SCTP nor echo */
	REASON_NOT_ALLOWED, /* client: its address is not in the service's allow list */
	REASON_VIP_DOWN, /* operator: ping to an address without a usable backend */
	REASON_NO_BACKEND, /* operator: no backend may take new flows */
	REASON_NONE_HERE, /* operator: no backend on this machine, and the policy allows no other */
	REASON_NO_FLOW, /* client: goes on with a flow that we do not know, or no longer */
	REASON_BAD_ACK, /* client: acknowledges what the server never sent */
	REASON_FLOWS_FULL, /* operator: raise max_flows */
	REASON_SNAT_FULL, /* operator: more snat_ports, more addresses of ours or more backends */
	REASON_NO_ROUTE, /* operator: the kernel has no route to where it goes */
	REASON_NOT_ON_LINK, /* operator: a server with forward = "dsr" is behind a router */
	REASON_NO_FORWARDING, /* operator: something turned the forwarding sysctl off */
	REASON_TTL, /* sender: loops, or starts with too small a TTL */
	REASON_TOO_BIG, /* operator: the way to the receiver takes only smaller packets, and the sender was told */
	REASON_UNKNOWN_PEER, /* operator: a tunnel packet from an address that is not in tunnel_sources */
	REASON_NOT_LOCAL, /* operator: came out of a tunnel, and is for an address that this machine has not */
	REASON_TAGS, /* operator: behind two VLAN tags only XDP can put packets into tunnels, or take them out */
	REASON_RATE, /* sender: more packets to be answered with ICMP than we answer */
	REASON_INTERNAL, /* us: a helper failed that does not fail */
	REASON_MAX,
};

enum action {
	ACTION_PASS, /* to the stack, untouched */
	ACTION_DROP,
	ACTION_FORWARD, /* by verdict.method */
	ACTION_ECHO, /* answer the ping */
	ACTION_RESET, /* answer with a TCP RST */
	ACTION_REFUSE, /* answer with ICMP port unreachable */
	ACTION_TOO_BIG, /* answer with ICMP: verdict.mtu is what fits */
	ACTION_DECAP, /* to the stack, out of its tunnel */
	ACTION_MAX,
};

/* What commit has to write when the packet is really sent. */
enum commit {
	COMMIT_NONE,
	COMMIT_TOUCH, /* the flow was seen */
	COMMIT_OPEN, /* new half-open flow; by nat with a source port of ours */
	COMMIT_ANSWER, /* the server answered a half-open flow */
	COMMIT_PROVE, /* the client proved itself: half-open becomes established */
	COMMIT_CLOSE, /* FIN or RST */
	COMMIT_PATH, /* remember the MTU of a path */
};

struct verdict {
	/* nat: what the packet becomes. dsr: dst is the server. Tunnels: addresses and ports of the outer packet. */
	struct tuple t;
	enum action action;
	enum reason reason;
	enum commit commit;
	__u32 frontend, backend; /* ids, when counted is 1 */
	__u32 mtu; /* ACTION_TOO_BIG: of the largest packet that fits, with its IP header */
	__u8 method; /* enum method */
	__u8 counted; /* 1: frontend is valid; 2: backend too */
	__u8 half; /* 1: the flow is in halfopen */
	__u8 sticky; /* 1: a new flow's client is to get this backend again */
	__u32 hash; /* of a one-way flow */
	__u8 pending; /* 1: its bit in `pending` is set */
	__u8 here; /* 1: nat without a source of ours; the stack delivers the packet */
	__u8 pad[2];
	struct chain chain; /* goes along, if chained */
};
