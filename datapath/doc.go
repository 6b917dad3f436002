// Package datapath forwards packets in the kernel. It implements lb.Datapath, and is independent of where services are
// configured and how their addresses are announced.
//
// # Programs
//
// Each uplink has three programs. sy_tc_in, at tc ingress, implements all of forwarding. sy_xdp is the fast path before
// it. It passes packets that XDP cannot send (no neighbour entry, or an egress interface without our XDP) to sy_tc_in,
// unchanged, uncommitted and uncounted. sy_tc_out, at tc egress, processes packets that this node itself sends: health
// checks that take the path of service traffic, and SYN-ACKs whose segment size must fit a tunnel.
//
// With an MTU above 1500, drivers accept only programs for multi-buffer frames, so sy_xdp is loaded with
// BPF_F_XDP_HAS_FRAGS. It can access only the first buffer, which contains all headers. tc answers such frames, and
// sends the ones that leave through another interface.
//
// These programs and sy_explain share one C core: parse → decide → route → commit → act (bpf/). The state of a packet
// is in a per-CPU map, because it does not fit on the stack, and because functions that read it there are verified once
// rather than per call site. decide only reads maps; commit is the only writer. commit runs once route has found that
// the packet can be sent, but before act sends it. The reason is that a new flow needs its own source port, and
// claiming a port is a write that may fail.
//
// decide is inlined rather than a global function, so that it can return the entry of a known flow. A second lookup
// among a million flows would cost more than all other work on a packet.
//
// Before these steps sy_xdp tries a shortcut (bpf/fast.h). Most packets are not ours, or are ordinary TCP or UDP
// packets that go where the hash or an established flow says. For these, the shortcut does the same as the steps, in
// registers. It leaves all other packets to the steps without having changed anything.
//
// docs/datapath.md lists the programs and maps.
//
// # Flows
//
// A NAT flow has an entry for each direction. Once established, its entries take three cache lines each. Most packets
// need two of them; the third has figures that few packets write (bpf/nat_types.h). The number of packets is written
// with the sequence numbers, from which the bytes of TCP follow. The key for the client's packets contains the frontend
// id instead of VIP and protocol; the key for the server's packets contains the id of the server's address. Each packet
// is looked up once: as a reply if its source is a backend's address, and otherwise as a client's packet. Only fields
// of an established entry that change are written.
//
// TCP and SCTP entries move to the tables of established flows once the client is confirmed, which means that it has
// acknowledged the server's sequence number. These are not LRU maps: packets with forged sources neither fill them nor
// evict entries. A SYN writes one entry, the server's, into an LRU map. The source port is one of six that are derived
// from the flow's hash, so deriving them again finds the entry for the ACK. If none of the six is available, random
// ports are tried. In that case, and when the hash does not determine the backend, the client's half-open entry is
// written as well. Slots list their previous backends until the timeout of half-open flows has passed
// (table.Services.Settle). Hints about the use of a port spare a SYN most of these lookups (bpf/snat.h). If half-open
// flows use all six, the oldest of them is replaced. An ACK whose entry was replaced is refused, because rebuilding the
// entry would let a flood of ACKs claim ports and reach the servers. SYN cookies are not used, because the datapath
// does not terminate connections. A server that needs them sends its own, which the ACK confirms. The server answers
// each SYN, even a forged one, with another cookie, so the entry keeps the server's first and last sequence numbers,
// and an ACK of either confirms the client.
//
// RST and FIN are checked against the last sequence numbers of both sides (RFC 5961). A RST with the exact number ends
// the flow. One inside the window shortens the timeout until either side sends again. One outside the window changes
// nothing. All are forwarded for the receiver to judge. A SYN for a live flow is forwarded to its server, which
// challenges it, and does not replace the flow.
//
// UDP has its own tables, which are not LRU maps either, because an evicted flow would give its source port, and with
// it a pending answer, to another client. A frontend may have as many flows as entries are free. A port is free again
// when its flow has expired. The timeout is half_open until the client sends again after an answer, and then udp.
//
// A source port stays unused for a while after its flow has ended. If the server sent FIN first, it keeps the
// connection in TIME_WAIT, so the port stays unused for 65 s. A SYN may use it earlier if the server must accept the
// SYN, because its timestamp or, without timestamps, its sequence number is later than the ended flow's last one (RFC
// 6191; RFC 1122, 4.2.2.13). Otherwise the port stays unused for closed.
//
// Flows to a backend that a plan lists as Down end immediately, at no cost per flow, because the backend's generation
// changes and each entry contains its backend's generation. For a packet whose flow has an older generation, the
// programs look up in sy_ended whether the flows of its frontend have ended, because a backend may be down for only one
// frontend. They treat packets of an ended flow as packets of an unknown flow, and its source port is free. A backend
// that returns has the new generation, so it receives none of its earlier flows.
//
// A UDP flow has expired when both sides have been idle for longer than its timeout (bpf/config.h), and a TCP or SCTP
// flow when its server has. A server that has the connection acknowledges everything that its client sends, including
// keepalives. A server that has lost it answers with RST. But a client can choose sequence numbers that make the RST
// look forged, or send segments that servers ignore, so the client's packets prove nothing. A FIN or RST starts its
// timeout for both sides.
//
// Run walks through the tables every five seconds, and within a second after flows have ended. It removes both entries
// of expired and ended flows, and sends the client of an ended TCP flow a RST with the sequence number that the client
// expects. The agent selects flows from copies of their entries. The program sy_gc compares each entry with its copy
// right before deleting it, because the key may belong to another flow by then.
//
// Without an agent (none has written to sy_collector for 15 s) the programs remove flows themselves when they store
// another flow. Otherwise the tables would fill with ended flows. A program cannot search a hash map for them, and a
// timer in each entry (bpf_timer) would need an allocation of its own. A single timer would have to walk through the
// whole table in one go, because bpf_for_each_map_elem cannot continue where it stopped. So an array holds the keys of
// flows, five per line, and the hash of a key determines eight lines. A packet that stores a flow removes the ended and
// expired flows in these lines, and in eight random lines when the table is full. While an agent runs and less than
// half of the table is used, new flows get no place in the array. This costs nothing, and always leaves half of the
// table for flows with a place. An agent that returns removes all other flows. The DSR tables are LRU maps, which need
// no collection.
//
// # Direct return
//
// With dsr and tunnel (IPIP, GUE) the servers answer clients directly (DSR), and the datapath sees only one direction.
// It avoids looking up each packet in a large table. The hash of a packet selects a slot of the frontend's table, the
// same on every balancer, and a slot that has always had the same backend needs no flow table. A slot that had other
// backends lists them (struct slot), and the flows of its packets are looked up. A flow is written when it opens and
// refreshed by a sample of its packets. Slots keep up to three previous backends until those are down, at the cost of
// this lookup.
//
// The datapath also decapsulates GUE packets from tunnel_sources, and passes the ones to an address of this node to the
// stack. Health checks of DSR servers send requests for the VIP to a given server, which the mark of their packets
// selects (internal/hook).
//
// # Chained frontends
//
// The backends of a frontend with lb.NodeForwarding are nodes that run this datapath (Kubernetes nodes). The node that
// receives a packet reads one slot and sends the packet unchanged to the node in it; it neither looks up nor writes a
// flow (bpf/spread.h). The target node has a second frontend for the same port (lb.Frontend.Decap) with its local pods,
// and stores the flow.
//
// A slot lists up to three of its previous nodes. The list is sent in the GUE private data (bpf/encap.h). A node that
// receives a packet of an unknown flow passes it to the next node in the list. Three nodes suffice when changes follow
// each other faster than connections end. The list only becomes shorter, so there are no loops. The last node refuses a
// packet of an unknown flow, but returns a UDP datagram to the first node, which opens the flow. A packet without a
// list is looked up once in the receiving node's table, because the sender's table may be out of date. Only
// lb.FrontendPlan.Nodes are listed, never nodes that are down.
//
// Nothing marks the first datagram of a flow, so the first datagrams of all flows would visit the previous nodes
// forever. Therefore UDP slots forget these nodes after timeout_udp (table.Services.Settle). By then the slot's node
// has relayed a datagram of each live flow that did not come back. It remembers these flows in sy_relays, where a
// frontend may have as many entries as are free, and continues to relay them. A flow is moved to another endpoint if
// its client was silent for longer while its server sent.
//
// With affinity the client's address determines the slot, and a node remembers the backend of a client. If the slot's
// node does not know a client, its connection goes to the previous nodes first. They open it if they know the client;
// otherwise it returns to the slot's node. Only nodes that accept new flows are asked, because others may be down.
// These slots keep their previous nodes, which are not asked about a client that the slot's node knows.
//
// A table of another size maps all flows to other slots, so the new table refers to the previous one. Flows that stay
// open while the size changes twice may be refused.
//
// sy_tc_in decapsulates packets from other nodes and continues with a tail call to sy_tc_decap. XDP leaves them to tc,
// because it cannot pass the list of nodes to the stack together with the packet.
//
// # Tunnel keys
//
// A node's source address does not prove that the node sent a packet, because masqueraded pods use it as well. So the
// GUE private data between nodes begins with a 64-bit token that is derived from a key of the cluster (internal/table).
// decap_parse compares it with the tokens of up to three keys, the previous, the current and the next one, so that
// nodes need not change keys at the same time.
//
// The token is the same for all packets with a key, and not a MAC over the packet. An attacker who can read the nodes'
// traffic could replay a MAC as well, for the flows that it sees; only encryption between nodes prevents that. An
// attacker who cannot read the traffic must guess 64 bits. The cost of the comparison is not measurable; SipHash-1-3
// over addresses and ports would cost 15 ns at each end.
//
// sy_tc_out drops packets to the tunnel port that our programs did not send. Our tc programs mark their packets
// (TUNNEL_MARK); packets that sy_xdp sends do not pass tc.
//
// # Trace
//
// The programs on the interfaces contain nothing for traces. Trace loads a second object with programs that are built
// from the same steps and use the same maps (bpf/trace.bpf.c), and exchanges the programs by link updates, so each
// packet is processed by one or the other. A constant in the same object would leave instructions in the programs that
// run all the time, and fentry needs BPF trampolines, which not all kernels of arm64 have. The programs copy a packet
// that the filter may select before its first step, and send a record after its last one, when its verdict and the
// translated addresses are known. Packets that the filter excludes by their addresses cost one comparison more. XDP
// records no packet that it passes to tc, and sy_tc_in none that it decapsulates for sy_tc_decap, because the next
// program does.
//
// The service proxy has such programs as well (bpf/inside_trace.bpf.c, TracePart), which send to the same ring buffer.
//
// The records stop without an agent, because it must renew the configuration every few seconds. The programs stay until
// the next agent attaches its own, as after every crash.
//
// # Restart, crash, upgrade
//
// Maps and links are pinned under PinPath in a directory named after the schema, so the kernel forwards with or without
// an agent. The agent also holds the links open, so nothing is detached when pins are removed or hidden by another
// mount, and the agent pins the links again (internal/hook). Open loads this binary's programs with the pinned maps,
// and replaces each program with an atomic link update. It takes pinned programs over instead if their object,
// constants and maps are the same (bpf.Build), because the verifier takes most of the time of a start. Ids of frontends
// and backends are read from the maps and do not change. A lock on the directory admits one agent at a time.
//
// A first start pins everything in a temporary directory, and publishes it with one rename(2). If Open fails, a first
// start leaves nothing behind, and a takeover restores the previous agent's program on each link (internal/pin).
//
// Open refuses the state of another schema without changing anything. Its programs keep running until "steelyard
// cleanup".
//
// # Tables of slots
//
// All tables are in one array of words (sy_slots); a frontend refers to its table by offset and size. A table is
// replaced as a whole. The new one is written through shared memory to words that no frontend refers to, and takes
// effect when its frontend is written. So no packet sees a partial table, or the slots of one table with the size of
// another. The old table's words are reused after a grace period (internal/table).
//
// This array, and the arrays of backends and counters, grow in chunks, which are arrays of the same size, so memory
// follows the configuration without a restart. A separate map per table would cost a system call that waits 13 ms for
// each change, a file and a pin per frontend, and lookups that the verifier cannot inline.
//
// # Hash
//
// Flows are hashed with NH, with keys derived from Options.HashSeed. This takes two multiplications or five, and nobody
// without the seed can craft flows that all select the same backend.
//
// # Changes to the node
//
// bpf_fib_lookup works only for an input interface with forwarding enabled. The programs pass lo, the only interface on
// which an appliance enables forwarding, because forwarding on uplinks would let clients into the servers' network. On
// a Kubernetes node (Options.Delivers) the stack forwards to the pods, so forwarding is enabled on the uplinks as well.
// accept_ra changes from 1 to 2 there, because a forwarding interface otherwise ignores router advertisements. The
// previous values are stored in StateDir, and Cleanup restores them.
//
// With nat and IPIP, IPv4 packets without DF that exceed the path MTU are handed to the kernel as if they had arrived
// on lo. The kernel forwards and fragments them (bpf/act_tc.h). accept_local is set on lo because of their source
// addresses. With dsr such packets could not be routed, and with GUE a receiving datapath like this one would not
// reassemble the fragments. In these cases the sender receives the ICMP error, as with DF.
//
// # Verification
//
// A VIP is announced only while its packets would be forwarded and answered (internal/verify). The agent verifies this
// after each change of links, addresses, routes, rules or forwarding, and for some frontends every second, or every 250
// ms while a fault is known. It checks that the links of its programs are on the interfaces and run them, and that lo
// forwards. It also checks what sy_explain returns for a synthetic packet of each frontend: the verdict, the route to
// the backend, and the route of the reply. It restores programs, pins and sysctls. Anything that it cannot restore
// becomes a fault of the VIP after 200 ms. The fault ends when nothing has been wrong for a second. The engine
// withdraws VIPs with a fault. The agent tries 16 flows, and reports a fault only if none would be answered. If only
// the flows of one backend among several would not be answered, the status says so. Health checks detect this if their
// packets take the same path.
//
// A synthetic packet changes nothing. Kernel notifications are only hints, so after an overrun the agent reads
// everything again. It attaches the programs to interfaces towards backends, where replies arrive, as soon as a backend
// or route requires it. It detaches them ten minutes after the last such route, so that a flapping route does not
// attach and detach programs.
//
// A route does not say whether its router is alive. Routers towards clients and backends are probed with ARP or NDP
// once a second (internal/route). A default route hides the loss of the right route. So when backends that were on a
// link are now reached through a router or the default route, one of them must answer a TCP handshake. For the same
// reason, most synthetic clients are addresses that only the default route covers. Problems that affect only some
// packets are warnings and withdraw nothing: clients that have lost their route, packets from other nodes that are not
// delivered here, and limits that are reached. The egress interface's filters and queues are not verified, nor are
// netfilter rules for backends on this node, because only real packets pass them, such as health checks and BGP
// sessions.
//
// The programs use a next hop for at most 250 ms before they look it up again (bpf/route.h), whether or not an agent
// runs.
package datapath
