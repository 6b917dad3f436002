/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/* Types shared with Go through bpf2go. No unions and no implicit padding: each byte has a name and one meaning. */
#pragma once
#include <linux/types.h>

/* IPv4 is stored as ::ffff:a.b.c.d (RFC 4291, 2.5.5.2), so both families share one code path. */
struct addr {
	__u32 w[4];
};

/* Addresses and ports of a flow: 36 bytes, with the same layout wherever a checksum covers them. */
struct tuple {
	struct addr src, dst;
	__be16 sport, dport;
};

#include "nat_types.h"

struct frontend_key {
	struct addr vip;
	__be16 port;
	__u8 proto; /* IPPROTO_* */
	__u8 decap; /* 1: the entry of a chained frontend for decapsulated packets, with the backends of this node */
};

/* Forwarding methods. With all but METHOD_NAT the server answers the client directly (direct server return). */
enum method {
	METHOD_NAT = 1,
	METHOD_DSR, /* rewrites the destination MAC address */
	METHOD_IPIP, /* RFC 2003, RFC 2473, RFC 4213 */
	METHOD_GUE, /* draft-ietf-intarea-gue, version 0 */
};

/* How a slot of the table is selected. */
enum algorithm {
	ALGORITHM_FLOW_HASH = 1, /* hash of addresses and ports */
	ALGORITHM_SOURCE_HASH, /* hash of the client address */
	ALGORITHM_RANDOM,
	ALGORITHM_ROUND_ROBIN, /* the next slot for each new flow, per CPU */
	ALGORITHM_LEAST_CONN, /* of a few random slots, the one with the fewest flows per weight */
};

/* A table of slots: its position in sy_slots. A slot is one word, the id of its backend. Flows
 * that were opened before a change may still belong to the earlier backends of their slot.
 * Those are in separate words, so that a packet of a slot without any reads only four bytes. */
struct table {
	__u32 first; /* word of slot 0 */
	__u32 slots; /* their number; 0: no table */
	__u32 previous; /* word of the earlier backends of slot 0, PREVIOUS_MAX for each slot; 0: no slot has one */
};

struct frontend {
	__u32 id;
	__u8 method; /* enum method */
	__u8 algorithm; /* enum algorithm */
	__u8 restricted; /* 1: only sources in sy_src_allow may open flows */
	__u8 drop_when_empty; /* 1: without a backend, new flows are dropped instead of refused */
	__be16 first_port; /* first port of a range; it maps to the backend's port */
	__u8 chained; /* 1: its backends are nodes that run this datapath; the delivering node stores the flows */
	__u8 local; /* 1: all of its backends are on this node, so XDP leaves its packets to tc */
	__u32 affinity; /* in seconds; 0: off */
	__u8 keep_source; /* 1: METHOD_NAT without SNAT: servers route their replies through this node */
	__u8 older_algorithm; /* slots of older; 0: the same */
	__u16 changed; /* when a slot last got another backend, by table_clock */
	struct table table;
	struct table older; /* the table before the last change of size or algorithm */
};

/* sy_port_ranges has a range of ports as the prefixes it consists of. */
struct range_key {
	__u32 prefix; /* bits of the following fields */
	struct addr vip;
	__be16 proto; /* 16 bits wide, so that the port begins at a multiple of 16 bits */
	__be16 port;
};

#define RANGE_BITS (128 + 16) /* bits before the port */

struct allow_key {
	__u32 prefix; /* bits of the following fields */
	__be32 frontend;
	struct addr source;
};

#define NO_BACKEND 0x7fffffff
#define ANY_BACKEND 0x7ffffffe /* in the list of a slot: the older table follows */
#define SLOT_CHANGED 0x80000000 /* the slot has earlier backends */

/* The earlier backends of a slot, the last one first, then NO_BACKEND. */
#define PREVIOUS_MAX 3

/* One element of a chunk of sy_slots. The elements of an array map are a multiple of 8 bytes large. */
#define LINE_WORDS 16
struct slot_line {
	__u32 words[LINE_WORDS];
};

/* Nodes that may have the flow of a packet, in the order in which they are tried. Tunnel packets carry it. */
#define CHAIN_MAX 3
struct chain {
	struct addr next[CHAIN_MAX];
	__u8 n; /* used entries of next */
	__u8 passed; /* 1: a node of the slot has relayed the packet */
	__u8 pad[2];
};

/* Nodes to which the datagrams of a flow are relayed. */
struct relay {
	struct addr next[CHAIN_MAX];
	__u32 n; /* used entries of next */
	__u32 seen; /* last datagram, in units of flow_clock */
};

/* The current key of the tunnels between nodes, the previous one and the next one. */
#define TUNNEL_KEYS_MAX 3
struct tunnel_keys {
	__u64 send; /* token of the packets sent; 0: none */
	__u64 accept[TUNNEL_KEYS_MAX]; /* tokens of the packets accepted; 0: unused */
	__u32 required; /* 1: packets without an accepted token are dropped */
	__u32 pad;
};

#define SNAT_ADDRS 4 /* a power of two */

struct backend {
	__u32 server; /* id of addr in sy_servers */
	__be16 port;
	__u8 local; /* 1: on this node: packets keep their source and go to the stack */
	__u8 keyed; /* 1: GUE to it has a token, because it runs this datapath */
	__u32 generation; /* changes when flows to it end (flow_ended) */
	struct addr addr;
	struct addr snat[SNAT_ADDRS]; /* source addresses towards the backend, best first; the rest is zero */
};

/* A backend that accepts new flows of a frontend. Only frontends with affinity or weights have entries. */
struct member_key {
	__u32 frontend, backend;
};

/* The value of a member: its weight in the lower bits, and above
 * them its epoch, which changes when a backend comes back. */
#define MEMBER_WEIGHT_BITS 12

struct affinity_key {
	struct addr client;
	__u32 frontend;
};

struct affinity {
	__u32 backend;
	__u32 epoch; /* of the member: after the member left, its client may have got another one */
	__u64 seen; /* last opened flow, CLOCK_MONOTONIC_COARSE in ns */
};

/* The ports of a datagram, from its first fragment. */
struct fragment_key {
	struct addr src, dst;
	__u32 id;
	__u32 proto;
};

struct fragment {
	__be16 sport, dport;
};

/* Path MTU to a backend, as reported by a router (RFC 1191, RFC 8201). */
struct pmtu {
	__u64 seen;
	__u32 mtu;
	__u32 pad;
};

enum addr_kind {
	ADDR_VIP = 1,
	ADDR_OWN = 2, /* of this node */
	ADDR_BACKEND = 4,
};

/* A result of bpf_fib_lookup: a cache line. */
struct next_hop {
	struct addr src, dst; /* what was looked up, with path */
	__u64 until; /* in jiffies */
	__u32 ifindex; /* egress interface */
	__u16 mtu; /* of the route, at most 65535 */
	__u8 smac[6], dmac[6];
	__u8 path; /* of several next hops of a route */
	__u8 to_uplink; /* see struct verdict */
	__u8 pad[4];
};

/* Destination of a health check packet, by its mark. */
struct probe {
	struct addr addr, local; /* of the server, and the source address towards it */
	__u8 method; /* enum method */
	__u8 keyed; /* as of the backend */
	__u8 pad[2];
};

/* Limit of ICMP errors, per CPU. */
struct token_bucket {
	__u64 refilled; /* CLOCK_MONOTONIC_COARSE in ns */
	__u64 tokens;
};

/* An interface that packets of clients and servers arrive on. */
struct uplink {
	__u32 ifindex; /* 0: none */
	__u8 mac[6];
	__u8 xmit; /* 1: native XDP may send from it */
	__u8 pad;
};

struct vip {
	__u8 up; /* 1: a frontend has a backend; the VIP answers ping */
	__u8 ranges; /* 1: a frontend of it is in sy_port_ranges */
	__u8 pad[2];
};

struct flow_key {
	struct tuple t; /* as the packet arrives */
	__u8 proto;
	__u8 pad[3];
};

/* A flow by direct return (DSR or tunnel): only the client's direction passes here. */
struct dsr_flow {
	__u32 frontend, backend; /* ids */
	__u64 seen; /* last packet that was looked up, CLOCK_MONOTONIC_COARSE in ns */
	__u8 state; /* enum flow_state */
	__u8 method; /* enum method */
	__u8 asked; /* 1: a SYN came at the time seen, and no packet since. FLOW_CLOSING, 1: it goes on half-closed */
	__u8 end; /* FLOW_CLOSING, FLOW_CLOSED: low byte of the number that follows the FIN or RST */
	__u32 generation; /* of the backend, when the entry was written (flow_ended) */
};

struct traffic {
	__u64 packets, bytes; /* both directions, as received */
	__u64 flows; /* opened; ALGORITHM_ROUND_ROBIN takes the slot of this number */
	__u64 replies; /* packets of servers, included in packets */
	__u64 continued; /* flows by DSR and tunnel whose client continued after its first packet; of backends only */
};

/* The only list of reasons: the names in metrics, tests and documents derive from it. Each comment says who must
 * act, and what to do. */
enum reason {
	REASON_NONE,
	/* none: not IP, or the destination is no VIP */
	REASON_NOT_OURS,
	/* none: sent to a backend or back to a client */
	REASON_FORWARDED,
	/* none: a ping of a VIP was answered */
	REASON_ECHO_REPLY,
	/* none: neighbour discovery, passed to the stack */
	REASON_NEIGHBOUR_DISCOVERY,
	/* none: the tunnel headers were removed, and the packet was passed to its local destination */
	REASON_DECAPSULATED,
	/* none: a router reported the path MTU to a backend */
	REASON_PMTU_LEARNED,
	/* sender: headers are truncated or inconsistent, or have an address that is never on the wire; fix the sender */
	REASON_MALFORMED,
	/* sender: the source is a VIP, this node or a broadcast address: forged, or used twice; find out who sends it */
	REASON_SOURCE_IS_LOCAL,
	/* none: a later fragment arrived before the first one of its datagram, which has the ports */
	REASON_FRAGMENT_NOT_FOUND,
	/* client: the VIP has no service on this port; correct the port */
	REASON_NO_FRONTEND,
	/* client: the protocol is not TCP, UDP, SCTP or ICMP echo; use one of these */
	REASON_UNSUPPORTED_PROTOCOL,
	/* client: the source is not in the service's allow list; use an allowed address */
	REASON_NOT_ALLOWED,
	/* operator: a ping was dropped because no service of the VIP has a usable backend; repair the backends */
	REASON_VIP_DOWN,
	/* operator: no backend accepts new flows; repair the backends or add some */
	REASON_NO_BACKEND,
	/* operator: this node has no backend and the policy allows no other; add a backend here or change the policy */
	REASON_NO_LOCAL_BACKEND,
	/* client: the packet belongs to no known flow, which may have timed out; open a new connection */
	REASON_NO_FLOW,
	/* client: the acknowledgement is for data that the server never sent; open a new connection */
	REASON_BAD_ACK,
	/* operator: the flow table is full; raise max_flows, which takes effect after steelyard cleanup */
	REASON_FLOWS_FULL,
	/* operator: some 200 tries found no free source port; use dsr or a tunnel, widen snat_ports, or add backends */
	REASON_SNAT_EXHAUSTED,
	/* operator: the service has its share of UDP flows, perhaps by a flood; use a tunnel, or raise max_flows */
	REASON_UDP_SHARE_FULL,
	/* operator: the kernel has no route to the destination; add one */
	REASON_NO_ROUTE,
	/* operator: a server with forward = "dsr" is behind a router; put it on the link or use a tunnel */
	REASON_NOT_ON_LINK,
	/* operator: forwarding is off on lo; set net.ipv4.conf.lo.forwarding=1 and net.ipv6.conf.lo.forwarding=1 */
	REASON_NO_FORWARDING,
	/* sender: the TTL or hop limit is used up; look for a routing loop or raise the initial TTL */
	REASON_TTL_EXPIRED,
	/* operator: larger than the path MTU, answered with an ICMP error; raise the MTU, or let ICMP errors pass */
	REASON_TOO_BIG,
	/* sender: an ICMP error for a NAT packet reports a path MTU below 1280, possibly forged; raise that MTU */
	REASON_PMTU_TOO_LOW,
	/* operator: the source of a tunnel packet is not in tunnel_sources; add it there if it should be */
	REASON_UNKNOWN_TUNNEL_SOURCE,
	/* operator: a tunnel packet without a valid key; look for a forged sender, or give it the same tunnel keys */
	REASON_TUNNEL_KEY_MISMATCH,
	/* operator: a process or pod of this node sent a packet to the tunnel port of another one; find and stop it */
	REASON_TUNNEL_SPOOFED,
	/* operator: a tunnel packet is for neither a VIP nor an address of lo on this node; correct the sender or add it */
	REASON_DECAP_NOT_LOCAL,
	/* operator: a router marked congestion on a tunnel packet, and the inner one is without ECN; relieve the path */
	REASON_CONGESTION_NOT_ECT,
	/* operator: a frame with a VLAN tag has a second one or would leave by another interface; use VLAN interfaces */
	REASON_VLAN_TAGGED,
	/* sender: the limit of ICMP errors per second is reached; find out why the sender causes them */
	REASON_ICMP_RATELIMITED,
	/* developer: a kernel helper failed where none should; report a bug */
	REASON_INTERNAL_ERROR,
	REASON_MAX,
};

enum action {
	ACTION_PASS, /* to the stack, unchanged */
	ACTION_DROP,
	ACTION_FORWARD, /* by verdict.method */
	ACTION_ECHO, /* answer with an echo reply */
	ACTION_RESET, /* answer with a TCP RST */
	ACTION_REFUSE, /* answer with ICMP port unreachable */
	ACTION_TOO_BIG, /* answer with an ICMP error; verdict.mtu is what fits */
	ACTION_DECAP, /* remove the tunnel headers, then pass the packet to the stack */
	ACTION_MAX,
};

/* What commit writes when the packet can be sent. */
enum commit {
	COMMIT_NONE,
	COMMIT_TOUCH, /* refresh the flow */
	COMMIT_OPEN, /* new half-open flow; with METHOD_NAT, claim a source port */
	COMMIT_ANSWER, /* the server answered a half-open flow */
	COMMIT_CONFIRM, /* the client is confirmed: the flow becomes established */
	COMMIT_CLOSE, /* FIN or RST */
	COMMIT_PMTU, /* store a path MTU */
	COMMIT_RELAY, /* store which nodes may have a flow of datagrams */
	COMMIT_FORGET, /* remove those nodes: the packet is dropped, and none of them has its flow */
	/* Flows by direct return. */
	COMMIT_DSR_MARK, /* set the pending bit of the flow */
	COMMIT_DSR_OPEN, /* new half-open flow, and its pending bit */
	COMMIT_DSR_STORE, /* the client continued, and its flow has no entry */
	COMMIT_DSR_CONFIRM, /* the client continued: the half-open flow becomes established */
	COMMIT_DSR_TOUCH,
	COMMIT_DSR_CLOSE,
};

struct verdict {
	/* METHOD_NAT: what the packet becomes. METHOD_DSR: dst is the server. Tunnels: outer addresses and ports. */
	struct tuple t;
	enum action action;
	enum reason reason;
	enum commit commit;
	__u32 frontend, backend; /* ids, see counted */
	__u32 mtu; /* ACTION_TOO_BIG: the largest packet that fits, IP header included */
	__u8 method; /* enum method */
	__u8 counted; /* 1: frontend is valid; 2: frontend and backend are */
	__u8 half_open; /* 1: the flow is in sy_halfopen */
	__u8 affinity; /* 1: store the backend of the new flow for the client */
	__u32 hash; /* of the flow */
	__u8 dsr_pending; /* 1: its bit in sy_dsr_pending is set */
	__u8 local; /* 1: METHOD_NAT without SNAT; the stack delivers the packet */
	__u8 to_uplink; /* 1: the packet leaves by an interface that XDP may send from */
	__u8 keyed; /* 1: METHOD_GUE with a token */
	__u8 reply; /* METHOD_NAT, 1: from the server to the client */
	__u8 claim; /* COMMIT_OPEN: enum claim */
	__u8 by_hash; /* COMMIT_OPEN, 1: backend and source follow from the hash */
	__u8 replaces; /* COMMIT_OPEN, 1: the client has a flow that has ended */
	__u32 now; /* METHOD_NAT: flow_clock */
	__u32 generation; /* of the backend, for the entry of the flow */
	__u8 later; /* COMMIT_OPEN, 1: the source is not the first choice */
	__u8 pad[3];
	struct client_key client; /* METHOD_NAT: the keys of the flow */
	struct server_key server;
	struct chain chain; /* the list that chained frontends send along */
};

/* What sy_explain returns. */
struct explained {
	struct verdict v; /* with the result of the route to the backend */
	__u32 ifindex; /* the interface towards the backend; 0: none */
	__u32 reply_ifindex; /* the interface towards the client; 0: none */
	enum reason route; /* REASON_FORWARDED: there is a route to the backend */
	/* REASON_FORWARDED: a reply of the backend is recognized, and there is a route to the client. REASON_NONE: replies
	 * do not pass this node. */
	enum reason reply;
};
