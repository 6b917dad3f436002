/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/* Maps of the service proxy (inside.h). They are in an object of their own, so their names repeat no name of maps.h. */
#pragma once
#include "maps.h"

/* Which connections an entry is for. */
enum in_scope {
	IN_INSIDE, /* of this node and its pods */
	IN_OUTSIDE, /* of other machines to this node's own addresses */
};

struct in_service_key {
	struct addr addr; /* ::ffff:0.0.0.0 or ::, all own addresses: a node port */
	__be16 port;
	__u8 proto; /* IPPROTO_* */
	__u8 scope; /* enum in_scope */
};

struct in_service {
	__u32 list; /* id of the list of endpoints */
	__u32 endpoints; /* its length */
	__u32 group; /* whose clients keep their endpoint (affinity) */
	__u32 affinity; /* seconds; 0: off */
	__u8 drop; /* 1: without an endpoint, drop rather than refuse */
	__u8 restricted; /* 1: only sources in sy_in_allow may connect */
	__u8 pad[2];
};

struct in_endpoint_key {
	__u32 list, index;
};

struct in_endpoint {
	struct addr addr;
	__be16 port;
	__u8 pad[2];
};

/* An endpoint in a list. Only lists of services with affinity have such entries. */
struct in_member_key {
	__u32 list;
	struct in_endpoint endpoint;
};

struct in_affinity_key {
	struct addr client;
	__u32 group;
};

struct in_affinity {
	struct in_endpoint endpoint;
	__u32 pad;
	__u64 seen; /* when the last connection opened, CLOCK_MONOTONIC_COARSE in ns */
};

/* Where a packet is looked up. */
enum in_place {
	IN_ARRIVES, /* where it comes from its sender */
	IN_LEAVES, /* where it leaves to the client */
};

struct in_flow_key {
	struct tuple t; /* as the packet is at the place */
	__u8 proto;
	__u8 place; /* enum in_place */
	__u8 pad[2];
};

/* How a packet continues after its translation. */
enum in_way {
	IN_STACK, /* in the stack, with the packet filter and the routes of the kernel */
	IN_BACK, /* out of the device by which it arrived: a client that is its own endpoint */
	IN_DEVICE, /* into the stack through the routed device */
	IN_SEND, /* to the next hop */
};

/* Flags of one side of a flow. The packets that it sends set the first three. */
#define IN_SEEN 1 /* it has sent a packet */
#define IN_FIN 2
#define IN_RST 4
#define IN_FROM_OUTSIDE 8 /* another machine opened the flow */
#define IN_CONFIRMED 16 /* TCP and SCTP: it has sent more than a SYN; UDP: in more than one second */
#define IN_REPLY 32 /* the entry is for replies */

/* One direction of a flow. The other direction's key follows from to (in_other). */
struct in_flow {
	struct tuple to; /* after translation */
	__u32 seen; /* when a packet last came, CLOCK_MONOTONIC_COARSE in seconds */
	__u8 way; /* enum in_way */
	__u8 flags;
	__u8 other; /* enum in_place of the other direction */
	__u8 asks; /* 1: the last packet has data, a SYN or a FIN, which TCP acknowledges */
	__u32 seq; /* TCP: the sequence number after the last packet; SCTP: as in struct pkt */
};

enum in_kind {
	IN_POD = 1, /* leads to pods */
	IN_UPLINK, /* leads to other machines */
};

/* What another service proxy does on this node. */
enum in_mode {
	IN_ALONE,
	IN_BESIDE, /* it has connections, but gets no new ones */
	IN_DRAINING, /* it gets the new ones */
};

/* A device with our programs. */
struct in_device {
	__u32 bridge; /* index of the bridge that the device is a port of, or 0 */
	__u32 netns; /* id of the peer's network namespace plus 1, or 0 if unknown */
	__u8 kind; /* enum in_kind */
	__u8 bare; /* 1: its frames have no Ethernet header, as of IPIP or WireGuard */
	__u8 pad[2];
};

/* The source of packets that this node sends by a device. */
struct in_source {
	__be32 v4; /* 0: none */
	struct addr v6; /* zero: none */
};

/* Address kinds. An interface of this node may have a ClusterIP, for example for a DNS cache. A process then receives
 * the packets, untranslated. */
#define IN_OWN 1 /* of this node */
#define IN_CLUSTER 2 /* of services: other ports are refused */
#define IN_SHARED 4 /* of a service, and perhaps of another machine */
#define IN_NODE_PORTS 8 /* of this node, and node ports answer there */
#define IN_LOCAL (IN_OWN | IN_CLUSTER)

#define IN_RANGES 16

/* Prefixes that cover all addresses of services and of this node, and perhaps others. */
struct in_ranges {
	__u32 n4, n6;
	__u32 mode; /* enum in_mode */
	__be32 net4[IN_RANGES], mask4[IN_RANGES];
	struct addr net6[IN_RANGES], mask6[IN_RANGES];
};

struct in_allow_key {
	__u32 prefix; /* length of the following fields in bits */
	__be32 group;
	struct addr source;
};

HASH(struct in_service_key, struct in_service, 262144) sy_in_services SEC(".maps");
HASH(struct in_endpoint_key, struct in_endpoint, 1 << 21) sy_in_endpoints SEC(".maps");
HASH(struct in_member_key, __u32, 1 << 20) sy_in_members SEC(".maps");
LPM_TRIE(struct in_allow_key, __u32, 1 << 18) sy_in_allow SEC(".maps");
LRU_HASH(struct in_affinity_key, struct in_affinity, 65536) sy_in_affinity SEC(".maps");

/* Not an LRU map, because that could evict a live flow. A full table accepts no new flows. */
#define IN_FLOWS (1 << 20)
HASH(struct in_flow_key, struct in_flow, IN_FLOWS) sy_in_flows SEC(".maps");

/* Address → its kinds (IN_OWN and others). */
HASH(struct addr, __u32, 131072) sy_in_addrs SEC(".maps");

HASH(__u32, struct in_device, 16384) sy_in_devices SEC(".maps");
HASH(__u32, struct in_source, 4096) sy_in_sources SEC(".maps");
ARRAY(struct in_ranges, 1) sy_in_ranges SEC(".maps");

/* Number of entries of flows that other machines have opened. They may use half of the table, so that their
 * flood leaves room for the node and its pods. The number is exact after each of the agent's walks, and too high in
 * between. */
ARRAY(__u32, 1) sy_in_outside SEC(".maps");

/* When a packet of a connection without a service last got another source port (in_direct), in seconds as in struct
 * in_flow. The agent sets it to 0 when there are no such connections. */
ARRAY(__u32, 1) sy_in_direct SEC(".maps");

/* A new flow: its endpoint and entries, and the key of another one that has to go. */
struct in_work {
	struct in_flow flow, reply;
	struct in_flow_key client_key, reply_key, old_key;
	struct in_endpoint endpoint;
	__u32 pad;
};
PERCPU_ARRAY(struct in_work, 1) sy_in_work SEC(".maps");

/* Packets that were not forwarded, and new flows, by reason. */
PERCPU_ARRAY(__u64, REASON_MAX) sy_in_counters SEC(".maps");
