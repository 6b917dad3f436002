/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/* States of flows, and entries of NAT flows; part of types.h. */
#pragma once

enum flow_state {
	FLOW_HALF_OPEN = 1, /* the client is not confirmed yet */
	FLOW_ESTABLISHED,
	FLOW_CLOSING, /* one side has sent FIN */
	FLOW_CLOSED, /* both have sent FIN, or one has sent RST */
};

/* The NAT flow tables have two entries for each flow: one for the client's packets and one for the server's packets.
 * Without preallocation, the kernel allocates an entry's 152 bytes, of which 56 precede the key, in a slab of 192.
 * So an entry takes three cache lines, and the first 48 bytes of the value end the second one. An established flow's
 * packet needs the third, with the figures, only for a FIN or retransmission, for a number that wraps, and once in 256
 * packets. The entries of the LRU maps, for half-open flows, are preallocated, and not aligned to lines. */
struct client_key {
	struct addr client;
	__u32 frontend; /* implies VIP and protocol; chained frontends: id of the entry for packets outside tunnels */
	__be16 sport, dport; /* as they arrive */
};

struct server_key {
	struct addr to; /* our address, or the client's with a local backend */
	__u32 server; /* id of the source address in sy_servers, and the protocol; see server_id */
	__be16 dport, sport; /* as they arrive */
};

enum fin {
	FIN_FIRST = 1, /* this side sent FIN before the other one, so it keeps the connection in TIME_WAIT */
	FIN_SECOND,
	FIN_ACKNOWLEDGED, /* server: FIN_FIRST, and the client has acknowledged it, and so everything that was sent */
	FIN_OVER, /* TCP server: FIN_SECOND, and the client has acknowledged it, so the server keeps nothing */
};

/* What remains uncertain until this side's next valid packet. */
enum flow_doubt {
	DOUBT_RESET = 1, /* whether the flow continues, because a RST with an inexact number was forwarded */
	DOUBT_TAG, /* ack of an SCTP server that has answered with several tags */
};

/* Half-open: the server has answered more than once, with different numbers. It sends SYN cookies, speaks SCTP, or has
 * received a forged SYN or INIT. client_end is the last of these numbers. */
#define ANSWERED_AGAIN 2

/* State of one side of a flow. Both entries begin with it. */
struct flow {
	/* TCP: sequence number after this side's last byte; half-open server: its first number. UDP: low word of the number
	 * of bytes. */
	__u32 end;
	__u32 ack; /* TCP: this side's last acknowledgement; SCTP: the tag in its packets */
	__u32 seen; /* flow_clock of the last packet */
	__u8 state; /* enum flow_state */
	__u8 packets; /* low byte of the number of packets; the rest is in flow_figures */
	__u8 doubt; /* enum flow_doubt */
	__u8 answered; /* 1: the server has answered; or ANSWERED_AGAIN */
	__u32 generation; /* the backend's when the flow was last found not to have ended (flow_ended) */
};

/* Figures of one side of a flow, which few of its packets write. */
struct flow_figures {
	__u32 opened; /* age_clock of the first packet */
	/* TCP: sequence number of the first byte. Half-open server: 1 once the handshake has been measured. */
	__u32 first;
	__u32 packets; /* in units of 256; struct flow has the rest */
	/* TCP and SCTP server: time from the client's first SYN to the server's first answer, in units of handshake_clock.
	 * Before the answer: handshake_clock of the SYN. */
	__u32 handshake;
	__u16 wraps; /* how often end passed 2^32 */
	__u16 resent; /* TCP: segments without new bytes, mostly retransmissions */
	__u8 fin; /* enum fin */
	__u8 client_packets; /* half-open server: number of the client's packets */
	__u8 pad[2];
};

/* What both entries have in common. */
struct flow_side {
	struct flow f;
	__u32 direction[7];
	struct flow_figures figures;
};

struct client_flow {
	struct flow f;
	struct addr source; /* source of packets to the server */
	__u32 backend; /* id */
	__be16 sport, dport; /* of packets to the server */
	__u32 pad;
	struct flow_figures figures;
};

struct server_flow {
	struct flow f;
	struct client_key client;
	__u32 backend; /* id */
	struct flow_figures figures;
	/* Half-open: sequence number after the client's SYN, or see ANSWERED_AGAIN. Closed: the client's last timestamp. */
	__u32 client_end;
};

/* Handshake times of a backend, in units of handshake_clock. n[i] is the number of times below 2^(HANDSHAKE_FIRST + i),
 * n[HANDSHAKE_BUCKETS - 1] that of all longer ones. */
#define HANDSHAKE_FIRST 7
#define HANDSHAKE_BUCKETS 16
struct handshakes {
	__u64 sum;
	__u64 n[HANDSHAKE_BUCKETS];
};

/* Keys of flows in their places, used to find expired flows (reclaim.h). Unused places are zero. */
#define PLACE_WAYS 5
struct place_line {
	struct server_key keys[PLACE_WAYS];
	__u64 pad;
};

/* What the agent tells the programs about its collection of a table's flows. */
struct collector {
	__u32 seen; /* flow_clock of its last write */
	__u32 place_from; /* flows stored after this number (sy_stored) receive a place */
};

/* How a new NAT flow gets its source port. */
enum claim {
	CLAIM_FREE = 1, /* no flow uses it */
	CLAIM_RESTED, /* the flow that used it has ended or expired */
	CLAIM_TIME_WAIT, /* the server keeps a connection in TIME_WAIT, which the SYN replaces */
	CLAIM_OVER, /* an ended half-open flow, or one of this client, uses it */
	CLAIM_EVICT, /* another client's half-open flow uses it */
};

/* A flow that the agent wants to remove (gc.h). */
struct gc_item {
	struct server_key key;
	__u32 backend, seen, generation; /* in the agent's copy */
};

enum gc_table {
	GC_HALF_OPEN,
	GC_UDP,
	GC_STREAM,
};

/* Input of sy_gc, instead of a packet. */
#define GC_ITEMS 64
struct gc_list {
	__u32 table; /* enum gc_table */
	__u32 items; /* number of items used */
	__u32 ended; /* 1: the flows have ended, so they are removed even if they have had packets since */
	__u32 since; /* when the agent began to read; a side with later packets is not idle */
	struct gc_item item[GC_ITEMS];
};
