/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/* Types shared with Go through bpf2go. They have no unions and no implicit padding, so each byte has a name and one
 * meaning. */
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
	__u8 decap; /* 1: for decapsulated packets of a chained frontend, with this node's backends */
};

/* Forwarding methods. With all except METHOD_NAT the server answers the client directly (direct server return). */
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
	ALGORITHM_ROUND_ROBIN, /* next slot for each new flow, per CPU */
	ALGORITHM_LEAST_CONN, /* among a few random slots, the one with the fewest flows per weight */
};

/* The position of a table of slots in sy_slots. A slot is one word, the id of its backend. Flows that were opened
 * before a change may still belong to previous backends of their slot. Those are in separate words, so a packet of a
 * slot without previous backends reads only four bytes. */
struct table {
	__u32 first; /* word of slot 0 */
	__u32 slots; /* number of slots; 0: no table */
	__u32 previous; /* word of slot 0's previous backends, PREVIOUS_MAX per slot; 0: no slot has any */
};

struct frontend {
	__u32 id;
	__u8 method; /* enum method */
	__u8 algorithm; /* enum algorithm */
	__u8 restricted; /* 1: only sources in sy_src_allow may open flows */
	__u8 drop_when_empty; /* 1: without a backend, drop new flows instead of refusing them */
	__be16 first_port; /* first port of a range, which maps to the backend's port */
	__u8 chained; /* 1: its backends are nodes that run this datapath; the delivering node stores the flows */
	__u8 local; /* 1: all its backends are on this node, so XDP leaves its packets to tc */
	__u32 affinity; /* seconds; 0: off */
	__u8 keep_source; /* 1: METHOD_NAT without SNAT; servers route their replies through this node */
	__u8 older_algorithm; /* slot selection in older; 0: as in table */
	__u16 changed; /* table_clock when a slot last got another backend */
	struct table table;
	struct table older; /* table before the last change of size or algorithm */
	__u8 local_clients, pad[3]; /* 1: connections that this machine opens are balanced (sock.h) */
};

/* sy_port_ranges stores a range of ports as the prefixes that cover it. */
struct range_key {
	__u32 prefix; /* length of the following fields in bits */
	struct addr vip;
	__be16 proto; /* plus 256 for decapsulated packets */
	__be16 port;
};

#define RANGE_BITS (128 + 16) /* bits before the port */

struct allow_key {
	__u32 prefix; /* length of the following fields in bits */
	__be32 frontend;
	struct addr source;
};

#define NO_BACKEND 0x7fffffff
#define ANY_BACKEND 0x7ffffffe /* in a slot's list: the older table follows */
#define SLOT_CHANGED 0x80000000 /* the slot has previous backends */

/* The previous backends of a slot, the latest one first, then NO_BACKEND. */
#define PREVIOUS_MAX 3

/* One element of a chunk of sy_slots. Array maps round the size of their elements up to a multiple of 8 bytes. */
#define LINE_WORDS 16
struct slot_line {
	__u32 words[LINE_WORDS];
};

/* Nodes that may have a packet's flow, in the order in which to try them. Tunnel packets carry this list. */
#define CHAIN_MAX 3
struct chain {
	struct addr next[CHAIN_MAX];
	__u8 n; /* number of entries used in next */
	__u8 passed; /* 1: a node of the slot has already relayed the packet */
	__u8 pad[2];
};

/* Nodes that the datagrams of a flow are relayed to. */
struct relay {
	struct addr next[CHAIN_MAX];
	__u32 n; /* number of entries used in next */
	__u32 seen; /* flow_clock of the last datagram */
};

/* Keys of the tunnels between nodes: the current, the previous and the next one. */
#define TUNNEL_KEYS_MAX 3
struct tunnel_keys {
	__u64 send; /* token of sent packets; 0: none */
	__u64 accept[TUNNEL_KEYS_MAX]; /* tokens of accepted packets; 0: unused */
	__u32 required; /* 1: drop packets without an accepted token */
	__u32 pad;
};

#define SNAT_ADDRS 4 /* a power of two */

struct backend {
	__u32 server; /* id of addr in sy_servers */
	__be16 port;
	__u8 local; /* 1: it is on this node; packets keep their source and go to the stack */
	__u8 keyed; /* 1: it runs this datapath, so GUE packets to it carry a token */
	__u32 generation; /* changes when the agent ends the flows to it (flow_ended) */
	struct addr addr;
	struct addr snat[SNAT_ADDRS]; /* source addresses towards the backend, the preferred one first; the rest is zero */
};

/* A backend that accepts new flows of a frontend. Only frontends with affinity or weights have such entries. */
struct member_key {
	__u32 frontend, backend;
};

/* A member's value has its weight in the lower bits and its epoch above them. The epoch changes when a backend
 * returns. */
#define MEMBER_WEIGHT_BITS 12

struct affinity_key {
	struct addr client;
	__u32 frontend;
};

struct affinity {
	__u32 backend;
	__u32 epoch; /* the member's; if it left and returned, the client may have another backend by now */
	__u64 seen; /* when the last flow opened, CLOCK_MONOTONIC_COARSE in ns */
};

/* A connection that this machine has opened to a VIP, and that the kernel opens to the backend instead. */
struct sock_flow {
	struct addr vip;
	__be16 port;
	__u8 pad[2];
	__u32 frontend, backend, generation; /* as in flows (flow_ended) */
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
	ADDR_OWN = 2, /* this node's address */
	ADDR_BACKEND = 4,
};

/* A result of bpf_fib_lookup. It fills a cache line. */
struct next_hop {
	struct addr src, dst; /* input of the lookup, with path */
	__u64 until; /* jiffies */
	__u32 ifindex; /* egress interface */
	__u16 mtu; /* the route's, at most 65535 */
	__u8 smac[6], dmac[6];
	__u8 path; /* selects one of the route's next hops */
	__u8 to_uplink; /* see struct verdict */
	__u8 pad[4];
};

/* Where a health check packet goes, by its mark. */
struct probe {
	struct addr addr, local; /* the server's address, and our source address towards it */
	__u8 method; /* enum method */
	__u8 keyed; /* as in struct backend */
	__u8 pad[2];
};

/* Rate limit of answers, per CPU. */
struct token_bucket {
	__u64 refilled; /* CLOCK_MONOTONIC_COARSE in ns */
	__u64 tokens;
};

/* An interface on which packets of clients and servers arrive. */
struct uplink {
	__u32 ifindex; /* 0: none */
	__u8 mac[6];
	__u8 xmit; /* 1: native XDP may send from it */
	__u8 pad;
};

struct vip {
	__u8 up; /* 1: one of its frontends has a backend, so the VIP answers pings */
	__u8 ranges; /* 1: one of its frontends is in sy_port_ranges */
	__u8 by_source, pad; /* 1: a routing rule has a source prefix with the VIP */
};

struct flow_key {
	struct tuple t; /* as the packet arrives */
	__u8 proto;
	__u8 pad[3];
};

/* A direct-return flow (DSR or tunnel). Only the client's direction passes here. */
struct dsr_flow {
	__u32 frontend, backend; /* ids */
	__u64 seen; /* when a packet last looked up this flow, CLOCK_MONOTONIC_COARSE in ns */
	__u8 state; /* enum flow_state */
	__u8 method; /* enum method */
	__u8 asked; /* 1: a SYN came at seen, and no packet since; with FLOW_CLOSING: the client continues half-closed */
	__u8 end; /* FLOW_CLOSING, FLOW_CLOSED: low byte of the sequence number after the FIN or RST */
	__u32 generation; /* the backend's when the entry was written (flow_ended) */
};

struct traffic {
	__u64 packets, bytes; /* both directions, as received */
	__u64 flows; /* flows opened; the number selects the slot with ALGORITHM_ROUND_ROBIN */
	__u64 replies; /* servers' packets, included in packets */
	__u64 continued; /* flows whose client sent more than the first packet; UDP with nat: whose server replied */
};

/* The only list of reasons. Metrics, tests and documents take the names from here. Each comment says who must act and
 * what to do. */
enum reason {
	REASON_NONE,
	/* none: not IP, or the destination is not a VIP */
	REASON_NOT_OURS,
	/* none: sent to a backend or back to a client */
	REASON_FORWARDED,
	/* none: a ping of a VIP was answered */
	REASON_ECHO_REPLY,
	/* none: neighbour discovery, passed to the stack */
	REASON_NEIGHBOUR_DISCOVERY,
	/* none: the tunnel headers were removed, and the packet was passed to its destination on this node */
	REASON_DECAPSULATED,
	/* none: a router reported the path MTU to a backend */
	REASON_PMTU_LEARNED,
	/* sender: headers are truncated or inconsistent, or have an address that is never on the wire; fix the sender */
	REASON_MALFORMED,
	/* sender: the source is a VIP, an address of this node or a broadcast address; find the host that sends it */
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
	/* operator: the port has used its share of UDP flows, perhaps in a flood; use a tunnel, or raise max_flows */
	REASON_UDP_SHARE_FULL,
	/* operator: the kernel has no route to the destination; add one */
	REASON_NO_ROUTE,
	/* operator: a server with forward = "dsr" is behind a router; put it on the link or use a tunnel */
	REASON_NOT_ON_LINK,
	/* operator: forwarding is off on lo; set net.ipv4.conf.lo.forwarding=1 and net.ipv6.conf.lo.forwarding=1 */
	REASON_NO_FORWARDING,
	/* sender: the TTL or hop limit is used up; look for a routing loop or raise the initial TTL */
	REASON_TTL_EXPIRED,
	/* operator: the packet exceeds the path MTU, which the sender was told; raise the MTU, or let ICMP errors pass */
	REASON_TOO_BIG,
	/* sender: an ICMP error for a NAT packet reports a path MTU below 1280, possibly forged; raise that MTU */
	REASON_PMTU_TOO_LOW,
	/* operator: the source of a tunnel packet is not in tunnel_sources; add it there if it is legitimate */
	REASON_UNKNOWN_TUNNEL_SOURCE,
	/* operator: a tunnel packet lacks a valid token; give the sender the tunnel keys, or find who forges it */
	REASON_TUNNEL_KEY_MISMATCH,
	/* operator: a process or pod of this node sent a packet to another node's tunnel port; find and stop it */
	REASON_TUNNEL_SPOOFED,
	/* operator: a tunnel packet is for neither a VIP nor an address of lo; correct the sender or add the address */
	REASON_DECAP_NOT_LOCAL,
	/* operator: a router marked congestion on a tunnel packet whose inner packet does not use ECN; relieve the path */
	REASON_CONGESTION_NOT_ECT,
	/* operator: a VLAN frame has a second tag or would leave by another interface; use VLAN interfaces */
	REASON_VLAN_TAGGED,
	/* sender: the limit of ICMP errors per second is reached; find out why the sender causes them */
	REASON_ICMP_RATELIMITED,
	/* developer: a kernel helper failed where none should; report a bug */
	REASON_INTERNAL_ERROR,
	REASON_MAX,
};

enum action {
	ACTION_PASS, /* pass to the stack, unchanged */
	ACTION_DROP,
	ACTION_FORWARD, /* as verdict.method says */
	ACTION_ECHO, /* answer with an echo reply */
	ACTION_RESET, /* answer with a TCP RST */
	ACTION_REFUSE, /* answer with ICMP port unreachable */
	ACTION_TOO_BIG, /* answer with an ICMP error; verdict.mtu is the largest size that fits */
	ACTION_DECAP, /* remove the tunnel headers, then pass to the stack */
	ACTION_MAX,
};

/* What commit writes if the packet can be sent. */
enum commit {
	COMMIT_NONE,
	COMMIT_TOUCH, /* refresh the flow */
	COMMIT_OPEN, /* new half-open flow; with METHOD_NAT, claim a source port */
	COMMIT_ANSWER, /* the server answered a half-open flow */
	COMMIT_CONFIRM, /* the client is confirmed: the flow becomes established */
	COMMIT_CLOSE, /* FIN or RST */
	COMMIT_PMTU, /* store a path MTU */
	COMMIT_RELAY, /* store the nodes that may have a UDP flow */
	COMMIT_FORGET, /* remove these nodes: the packet is dropped, and none of them has its flow */
	/* Direct-return flows. */
	COMMIT_DSR_MARK, /* set the flow's pending bit */
	COMMIT_DSR_OPEN, /* new half-open flow, and its pending bit */
	COMMIT_DSR_STORE, /* the client continued, and its flow has no entry */
	COMMIT_DSR_CONFIRM, /* the client continued: the half-open flow becomes established */
	COMMIT_DSR_TOUCH,
	COMMIT_DSR_CLOSE,
};

struct verdict {
	/* METHOD_NAT: addresses and ports of the translated packet. METHOD_DSR: dst is the server. Tunnels: outer addresses
	 * and ports. */
	struct tuple t;
	enum action action;
	enum reason reason;
	enum commit commit;
	__u32 frontend, backend; /* ids; see counted */
	__u32 mtu; /* ACTION_TOO_BIG: largest packet that fits, including its IP header */
	__u8 method; /* enum method */
	__u8 counted; /* 1: frontend is valid; 2: backend is valid as well */
	__u8 half_open; /* 1: the flow is in sy_halfopen_* */
	__u8 affinity; /* 1: store the new flow's backend for the client */
	__u32 hash; /* flow hash */
	__u8 dsr_pending; /* 1: the flow's bit in sy_dsr_pending is set */
	__u8 local; /* 1: METHOD_NAT, and the stack delivers the packet */
	__u8 to_uplink; /* 1: XDP may send from the egress interface */
	__u8 keyed; /* 1: METHOD_GUE with a token */
	__u8 reply; /* METHOD_NAT, 1: from the server to the client */
	__u8 claim; /* COMMIT_OPEN: enum claim */
	__u8 by_hash; /* COMMIT_OPEN, 1: the hash determines backend and source */
	__u8 replaces; /* COMMIT_OPEN, 1: the client has an ended flow with this key */
	__u32 now; /* METHOD_NAT: flow_clock */
	__u32 generation; /* the backend's, for the flow's entry */
	__u8 later; /* COMMIT_OPEN, 1: the source is not the first choice */
	__u8 pad[3];
	struct client_key client; /* METHOD_NAT: keys of the flow */
	struct server_key server;
	struct chain chain; /* list that the packet of a chained frontend carries */
};

/* What sy_explain returns. */
struct explained {
	struct verdict v; /* after the route lookup to the backend */
	__u32 ifindex, reply_ifindex; /* interfaces towards the backend and the client; 0: none */
	__u32 reply_via; /* interface by which egress_reroute sends the reply; 0: as the stack */
	enum reason route; /* REASON_FORWARDED: there is a route to the backend */
	/* REASON_FORWARDED: the backend's reply is recognized, and there is a route to the client. REASON_NONE: replies do
	 * not pass this node. */
	enum reason reply;
};
