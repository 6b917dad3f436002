/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/* States of flows, and the entries of NAT flows; part of types.h. */
#pragma once

enum flow_state {
	FLOW_HALF_OPEN = 1, /* the client is not confirmed yet */
	FLOW_ESTABLISHED,
	FLOW_CLOSING, /* one side has sent FIN */
	FLOW_CLOSED, /* both have, or one has sent RST */
};

/* The NAT flow tables have two entries for each flow: one for the packets of the client, one for those of the
 * server. With its kernel header each is at most 128 bytes, which the kernel allocates as two cache lines. */
struct client_key {
	struct addr client;
	__u32 frontend; /* implies VIP and protocol; for chained frontends, the entry for packets outside tunnels */
	__be16 sport, dport; /* as they arrive */
};

struct server_key {
	struct addr to; /* our address, or with a local backend the client's */
	__u32 server; /* id of the source address in sy_servers, and the protocol: see server_id */
	__be16 dport, sport; /* as they arrive */
};

enum fin {
	FIN_FIRST = 1, /* this side has sent FIN before the other one: it keeps the connection in TIME_WAIT */
	FIN_SECOND,
	FIN_ACKNOWLEDGED, /* of a server: FIN_FIRST, and the client has acknowledged it, and so all that was sent */
	FIN_OVER, /* of a server of TCP: FIN_SECOND, and the client has acknowledged it: it keeps nothing */
};

/* What remains uncertain until a later packet of this side. */
enum flow_doubt {
	DOUBT_RESET = 1, /* whether the flow continues: a RST with an inexact number was forwarded */
	DOUBT_TAG, /* ack of an SCTP server that has answered with several tags */
};

/* Of a half-open flow: the server has answered more than once, with different numbers. Either it sends SYN cookies,
 * or it speaks SCTP, or it received a SYN or INIT that others forged. client_end is the last of its numbers. */
#define ANSWERED_AGAIN 2

/* The first part of both entries: the state of one side of the flow. */
struct flow {
	__u32 end; /* TCP: sequence number after the last byte of this side; server, half-open: its first one */
	__u32 ack; /* TCP: the last acknowledgement by this side; SCTP: the tag in its packets */
	__u32 seen; /* last packet, in units of flow_clock */
	__u8 state; /* enum flow_state */
	__u8 fin; /* enum fin */
	__u8 doubt; /* enum flow_doubt */
	__u8 answered; /* 1: the server has answered; ANSWERED_AGAIN */
	__u32 generation; /* of the backend, when the flow was last found not to have ended (flow_ended) */
};

struct client_flow {
	struct flow f;
	struct addr source; /* of the packets to the server */
	__u32 backend; /* id */
	__be16 sport, dport; /* of the packets to the server */
};

struct server_flow {
	struct flow f;
	struct client_key client;
	__u32 backend; /* id */
	/* half-open: sequence number after the SYN of the client, or see ANSWERED_AGAIN; closed: its last timestamp */
	__u32 client_end;
};

/* Places of flows, used to find flows that have expired (reclaim.h). Unused ones are zero. */
#define PLACE_WAYS 5
struct place_line {
	struct server_key keys[PLACE_WAYS];
	__u64 pad;
};

/* What the agent says about its collection of a table's flows. */
struct collector {
	__u32 seen; /* flow_clock of its last write */
	__u32 place_from; /* flows stored after this number (sy_stored) get a place */
};

/* How a new NAT flow gets its source port. */
enum claim {
	CLAIM_FREE = 1, /* no flow uses it */
	CLAIM_RESTED, /* the flow that used it has ended or expired */
	CLAIM_TIME_WAIT, /* the server keeps a connection in TIME_WAIT that the SYN replaces */
	CLAIM_OVER, /* a half-open flow of this client, or one that has ended, uses it */
	CLAIM_EVICT, /* a half-open flow of another client uses it */
};

/* Flows that the agent wants removed (gc.h). */
struct gc_item {
	struct server_key key;
	__u32 backend, seen, generation; /* of the copy */
};

enum gc_table {
	GC_HALF_OPEN,
	GC_UDP,
	GC_STREAM,
};

/* What the agent sends instead of a packet. */
#define GC_ITEMS 64
struct gc_list {
	__u32 table; /* enum gc_table */
	__u32 items; /* entries that are used */
	__u32 ended; /* 1: the flows have ended, and are removed even if they have had packets since */
	__u32 since; /* when the agent began to read: a side that has had packets since is not idle */
	struct gc_item item[GC_ITEMS];
};
