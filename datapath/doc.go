// Package datapath forwards packets in the kernel. It implements lb.Datapath, and does not depend on where services are
// configured or how their addresses are announced.
//
// # Programs
//
// Each uplink has three programs. sy_tc_in, at tc ingress, implements all of forwarding. sy_xdp is the fast path before
// it: it passes a packet that XDP cannot send (no neighbour entry, or an egress interface without our XDP) unchanged,
// neither committed nor counted, to sy_tc_in. sy_tc_out, at tc egress, processes packets that this node itself sends:
// health checks that take the path of service traffic, and SYN-ACKs whose segment size must fit a tunnel.
//
// With an MTU above 1500 sy_xdp is loaded for multi-buffer frames (BPF_F_XDP_HAS_FRAGS), because drivers refuse other
// programs. It can access only the first buffer, which contains all headers. tc answers such frames, and sends those
// that leave through another interface.
//
// These programs and sy_explain share one C core: parse → decide → route → commit → act (bpf/). The state of a packet
// is in a per-CPU map, because it does not fit on the stack, and because functions that read it there are verified once
// rather than per call site. decide only reads maps. commit is the only writer. It runs once it is known that the
// packet can be sent, but before it is sent: a flow may be opened only with its own source port, and taking a port is a
// write that may fail.
//
// decide returns the entry of a known flow, so it is inlined instead of being a global function: a second lookup among
// a million flows would cost more than all other work on a packet.
//
// Before these steps sy_xdp tries a shortcut (bpf/fast.h). Most packets are not ours, or are ordinary TCP or UDP
// packets that go where the hash or an established flow says. For these the shortcut does the same as the steps, in
// registers. It leaves all other packets to the steps before it has changed anything.
//
// docs/datapath.md lists programs and maps.
//
// # Flows
//
// A NAT flow has an entry for each direction, two cache lines each. The key of a client's packets contains the frontend
// id instead of VIP and protocol, and the key of a server's packets the id of the server's address. A packet is looked
// up once, as a reply only if its source is a backend's address, and an established entry is written only where
// something changed.
//
// TCP and SCTP entries move to the tables of established flows once the client is confirmed, which means that it has
// acknowledged the server's sequence number. These are not LRU maps: packets with forged sources neither fill them nor
// evict entries. A SYN writes one entry, the server's, into an LRU map. The source port is one of six that follow from
// the hash of the flow, so the ACK finds the entry by computing them again. If none of the six is available, random
// ports are tried. In that case, and where the backend does not follow from the hash, the client's half-open entry is
// written as well. Slots list their previous backends until the timeout of half-open flows has passed
// (table.Services.Settle). Hints about the use of a port spare a SYN most of these lookups (bpf/snat.h). If half-open
// flows use all six, the oldest of them is replaced. An ACK whose entry was replaced is refused: rebuilding the entry
// would let a flood of ACKs take ports and reach the servers. SYN cookies are not used, because the datapath does not
// terminate connections: a server that needs them sends its own, which the ACK confirms. Each SYN, even a forged one,
// gets another cookie, so the entry keeps the server's first and last sequence numbers, and either confirms.
//
// RST and FIN are checked against the last sequence numbers of both sides (RFC 5961). A RST with the exact number ends
// the flow; one in the window shortens the timeout until either side sends again; one outside the window changes
// nothing. All are forwarded, and the receiver judges them. A SYN for a live flow is forwarded to its server and does
// not replace the flow: the server challenges it.
//
// UDP has its own tables, which are not LRU maps either, because an evicted flow would give its source port, and with
// it a pending answer, to another client. A frontend may use all free entries. A port is free again when its flow has
// expired: after half_open until the client sends again after an answer, then after udp.
//
// A source port stays unused for a while after its flow has ended. If the server sent FIN first, it keeps the
// connection in TIME_WAIT, so the port stays unused for 65 s, unless the server must accept the SYN because its
// timestamp or, without timestamps, its sequence number is later than the last one of the ended flow (RFC 6191; RFC
// 1122, 4.2.2.13). Otherwise the port stays unused for closed.
//
// Flows to a backend that a plan lists as Down end at once and at no cost per flow: the backend gets a new generation,
// and each entry contains the generation of its backend. A packet whose flow has an earlier generation reads from
// sy_ended whether the flows of its frontend have ended since, because a backend may be down for only one frontend.
// Packets of an ended flow are treated as packets of an unknown flow, and its source port is free. A backend that
// returns has the new generation, so it receives none of its earlier flows.
//
// A UDP flow has expired when both sides have been idle for longer than its timeout (bpf/config.h), and a TCP or SCTP
// flow when its server has. A server that has the connection acknowledges everything its client sends, including
// keepalives. A server that has lost it answers with RST, but a client can choose sequence numbers that make the RST
// look forged, or send segments that servers ignore, so the client's packets prove nothing. A timeout that follows from
// a FIN or RST starts with it for both sides.
//
// Run walks through the tables every five seconds, and within a second after flows have ended. It removes both entries
// of flows that have expired or ended, and sends the client of an ended TCP flow a RST with the sequence number that it
// expects. The agent selects flows from copies of their entries. The program sy_gc compares each entry with its copy
// right before deleting it, because the key may belong to another flow by then.
//
// Without an agent (none has written to sy_collector for 15 s) the programs remove flows themselves when they store
// another one, because otherwise the tables would fill with ended flows. A program cannot search a hash map for them; a
// timer in each entry (bpf_timer) does not fit into its two cache lines; and a single timer would have to walk through
// the whole table at once, because bpf_for_each_map_elem cannot continue where it stopped. So the keys of flows are in
// an array, five per line, and the hash of a key determines eight lines. A packet that stores a flow removes the ended
// and expired flows in its lines, and in eight random lines when the table is full. Flows that are stored while an
// agent runs and less than half of the table is used have no place in the array. That costs nothing, and half of the
// table always remains for flows with a place. An agent that returns removes all others. The DSR tables are LRU maps,
// which need no collection.
//
// # Direct return
//
// With dsr and tunnel (IPIP, GUE) the servers answer clients directly (DSR), and the datapath sees only one direction.
// It avoids a lookup in a large table per packet: the hash of a packet selects a slot of the frontend's table, the same
// on every balancer, and a slot that has always had the same backend needs no flow table. A slot that had other
// backends lists them (struct slot), and its packets look up their flow. A flow is written when it opens and refreshed
// by a sample of its packets. Slots keep their previous backends until cleanup, at the cost of a lookup.
//
// The datapath also decapsulates GUE packets from tunnel_sources: a packet to an address of this node is passed to the
// stack. Health checks of DSR servers request the VIP from one given server, which the mark of their packets selects
// (internal/hook).
//
// # Chained frontends
//
// The backends of a frontend with lb.NodeForwarding are nodes that run this datapath (Kubernetes nodes). The node that
// receives a packet reads one slot and sends the packet unchanged to the node in it; it neither looks up nor writes a
// flow (bpf/spread.h). The target node has a second frontend for the same port (lb.Frontend.Decap) with its local pods,
// and stores the flow.
//
// A slot lists up to three nodes that had it before. The list travels in the GUE private data (bpf/encap.h). A node
// that receives a packet of an unknown flow passes it to the next node of the list. Three nodes cover changes that
// follow each other faster than connections end. The list only becomes shorter, so there are no loops. The last node
// refuses a packet of an unknown flow, but returns a datagram to the first node, which opens the flow. A packet without
// a list is looked up once in the receiving node's table, because the sender's table may be older. Only
// lb.FrontendPlan.Nodes are listed, never nodes that are down.
//
// Nothing marks the first datagram of a flow, so each would visit the previous nodes forever. Therefore UDP slots
// forget these nodes after timeout_udp (table.Services.Settle). By then the slot's node has relayed a datagram of each
// live flow and did not get it back. It remembers these flows in sy_relays, where a frontend may use all free entries,
// and continues to relay them. A flow whose client was silent for longer while its server sent gets another endpoint.
//
// With affinity the client's address determines the slot, and a node remembers the backend of a client. If the slot's
// node does not know a client, its connection goes to the previous nodes first. They open it if they know the client;
// otherwise it returns. Only nodes that accept new flows are asked, because others may be down. These slots do not
// forget previous nodes, but for a client that the slot's node knows, none is asked.
//
// A table of another size maps all flows to other slots, so the previous table is kept behind the new one. Flows that
// are open across two changes of size may be refused.
//
// sy_tc_in decapsulates such packets and continues with a tail call to sy_tc_decap. XDP leaves them to tc, because it
// cannot pass the list of nodes to the stack together with the packet.
//
// # Tunnel keys
//
// A node's source address does not prove that the node sent a packet, because masqueraded pods use it as well. So the
// GUE private data between nodes begins with a 64-bit token that is derived from a key of the cluster (internal/table).
// decap_parse compares it with the tokens of up to three keys, the previous, the current and the next one, so that
// nodes need not change keys at the same time.
//
// The token is the same for all packets with a key. It is not a MAC over the packet: an attacker who can read the
// nodes' network could replay a MAC for the flows that it sees, and only encryption between nodes helps against that.
// An attacker who cannot read it must guess 64 bits. The cost of the comparison is not measurable; SipHash-1-3 over
// addresses and ports would cost 15 ns at each end.
//
// sy_tc_out drops packets to the tunnel port that our programs did not send. Packets of our programs have a mark
// (TUNNEL_MARK). Packets that sy_xdp sends do not pass tc.
//
// # Restart, crash, upgrade
//
// Maps and links are pinned under PinPath in a directory named after the schema, so the kernel forwards with or without
// an agent. The agent also holds the links open: when pins are removed or hidden by another mount, nothing is detached,
// and the agent pins the links again (internal/hook). Open loads the programs of this binary with the pinned maps, and
// exchanges each program with an atomic link update. Ids of frontends and backends are read from the maps and do not
// change. A lock on the directory admits one agent at a time.
//
// A first start pins everything in a temporary directory, and publishes it with one rename(2). If Open fails, a first
// start leaves nothing behind, and a takeover restores the earlier agent's program on each link (internal/pin).
//
// Open refuses the state of another schema and changes nothing: the programs of that state keep running until
// "steelyard cleanup". The first release has no earlier one to take over flows from.
//
// # Tables of slots
//
// All tables are in one array of words (sy_slots); a frontend refers to its table by offset and size. A table is
// replaced as a whole. The new one is written through shared memory to a region that no frontend refers to, and takes
// effect with the write of its frontend. So no packet sees a partial table, or the slots of one table with the size of
// another. The old table's words are reused after a grace period (internal/table).
//
// This array, and the arrays of backends and counters, grow in chunks, which are arrays of the same size, so memory
// follows the configuration without a restart. A separate map per table would cost a system call that waits 13 ms for
// each change, a file and a pin per frontend, and lookups that the verifier cannot inline.
//
// # Hash
//
// The hash of a flow is NH with keys derived from Options.HashSeed. It takes two or five multiplications, and nobody
// without the seed can craft flows that all get the same backend.
//
// # Changes to the node
//
// bpf_fib_lookup works only for an input interface with forwarding enabled. The programs pass lo, the only interface on
// which an appliance enables forwarding: with forwarding uplinks it would route clients into the servers' network. On a
// Kubernetes node (Options.Delivers) the stack forwards to the pods, so forwarding is enabled on the uplinks as well,
// and accept_ra changes from 1 to 2, because a forwarding interface otherwise ignores router advertisements. The
// previous values are stored in StateDir, and Cleanup restores them.
//
// IPv4 packets without DF that exceed the path MTU, with NAT or IPIP, are handed to the kernel as if they had arrived
// on lo, and it forwards and fragments them (bpf/act_tc.h). accept_local is set on lo for their sources. With dsr they
// could not be routed, and with GUE a receiving datapath like this one would not reassemble the fragments. In these
// cases the sender gets the ICMP error, as with DF.
//
// # Verification
//
// A VIP is announced only while its packets would be forwarded and answered (internal/verify). After each change of
// links, addresses, routes, rules or forwarding, and every 250 ms for some frontends, the agent checks that the links
// of its programs are on the interfaces and run them, that lo forwards, and what sy_explain returns for a synthetic
// packet of each frontend: the verdict, the route to the backend, and the route of the reply. It restores programs,
// pins and sysctls. Anything that it cannot restore becomes a fault of the VIP after 200 ms, and the fault ends when
// nothing has been wrong for a second. The engine withdraws VIPs with a fault. The agent tries 16 flows, and reports a
// fault only if none would be answered. If only the flows of one backend of several would not be, the status says so.
// Health checks detect that if their packets take the same path.
//
// A synthetic packet changes nothing, and kernel notifications are only hints: after an overrun everything is read
// again. Interfaces towards backends get the programs as soon as a backend or a route requires it, because replies
// arrive there. They keep them for ten minutes after the last such route, so that a flapping route
// does not attach and detach programs.
//
// A route does not say whether its router is alive. Routers towards clients and backends are probed with ARP or NDP
// once a second (internal/route). When a router or the default route now leads to backends that were on a link, one of
// them must answer a TCP handshake, because a default route hides the loss of the right route. For
// the same reason the synthetic clients are chosen so that only the default route covers most of them.
// Problems that affect only some packets are warnings and withdraw nothing: clients that have lost
// their route, packets from other nodes that are not delivered here, limits that are reached. The filters and queues of
// the egress interface and, for backends on this node, netfilter rules are not verified, because synthetic packets do
// not pass them. Packets of health checks and BGP sessions do.
//
// The programs use a next hop for at most 250 ms before they look it up again (bpf/route.h), whether or not an agent
// runs.
package datapath
