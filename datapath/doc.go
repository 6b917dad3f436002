// Package datapath forwards packets in the kernel. It implements lb.Datapath. It is independent of where services are
// configured and how their addresses are announced.
//
// # Programs
//
// Each uplink has three programs. sy_tc_in, at tc ingress, implements all of forwarding. sy_xdp is the fast path before
// it: a packet that XDP cannot send (no neighbour entry, or an egress interface without our XDP) is passed unchanged,
// not committed and not counted, and sy_tc_in processes it. sy_tc_out, at tc egress, processes packets that this node
// sends itself: health checks that take the path of traffic, and SYN-ACKs whose segment size must fit a tunnel.
//
// With an MTU above 1500 sy_xdp is loaded for frames of several buffers (BPF_F_XDP_HAS_FRAGS): drivers refuse other
// programs there. It reaches the first buffer only, which has all headers. tc answers such frames, and sends those
// that leave by another interface.
//
// All of them, and sy_explain, share one C core: parse → decide → route → commit → act (bpf/). The state of a packet is
// in a per-CPU map, because it does not fit on the stack, and because functions that read it there are verified once
// and not per call site. decide only reads maps. commit is the only writer. It runs after it is known that the packet
// can be sent and before it is sent: a flow may be opened only with a source port of its own, and taking a port is a
// write that may fail.
//
// decide returns the entry of a known flow. So it is inlined and not a global function: a second lookup among a million
// flows would cost more than all other work on a packet.
//
// Before these steps sy_xdp tries a shorter way (bpf/fast.h). Most packets are not ours, or are of TCP or UDP without
// anything special and go where the hash or an established flow says. For these it does the same as the other steps, in
// registers. It leaves all others to them before it has changed anything.
//
// docs/datapath.md lists programs and maps.
//
// # Flows
//
// A flow by nat has an entry for each direction, each of two cache lines. The key of a client's packets has the
// frontend id in place of VIP and protocol, that of a server's packets the id of its address. A packet is looked up
// once, as a reply only when its source is the address of a backend, and an established entry is written only where
// something changed.
//
// The entries of TCP and SCTP are in the tables of established flows once the client is confirmed: it acknowledges the
// server's sequence number. These are not LRU maps: packets with forged sources neither fill them nor evict entries. A
// SYN writes one entry, the server's, into an LRU map. The source port is one of six that follow from the hash of the
// flow, so the ACK finds the entry by computing them again. When none of the six can be had, others are tried at
// random; then, and where the backend does not follow from the hash, the client's half-open entry is written, too.
// Slots list the backends they had before, and are cleared of them after the timeout of half-open flows
// (services.settle). Hints of what a port is used for spare a SYN most of these lookups (bpf/snat.h). When half-open
// flows have the six, the oldest of them is replaced. An ACK whose entry was replaced is refused: rebuilding it would
// let a flood of ACKs take ports, and reach the servers. SYN cookies are not used, because the datapath does not end
// connections: a server that needs them sends its own, which the ACK confirms. Each SYN gets another cookie, also a
// forged one, so the entry keeps the first and the last number of the server, and either confirms.
//
// RST and FIN count by the last numbers of both sides (RFC 5961). A RST with the exact number ends the flow; in the
// window it shortens the timeout until either side sends again; outside nothing changes. All are forwarded, and the
// receiver judges them. A SYN is forwarded to the server of a live flow and replaces none: the server challenges it.
//
// UDP has tables of its own, which are no LRU maps either, because an evicted flow would give its source port, and with
// it an answer that is still to come, to another client. A frontend may have as many as are free. A port is free again
// when its flow has expired: after half_open until the client sends again after an answer, then after udp.
//
// A source port rests after a flow has ended. When the server sent FIN first it keeps the connection in TIME_WAIT, so
// the port rests for 65 s, unless the server must accept the SYN: its timestamp is later than the last one of the ended
// flow, or, without timestamps, its sequence number (RFC 6191; RFC 1122, 4.2.2.13). Otherwise it rests for closed.
//
// Flows to a backend that a plan lists as Down end at once and at no cost per flow: the backend gets another
// generation, and each entry has that of its backend. A packet whose flow has an earlier one reads in sy_ended whether
// the flows of its frontend ended since then; a backend may be down for one frontend only. Packets of a flow that has
// ended are those of an unknown flow, and its source port is free. A backend that returns has the new generation, so it
// gets no earlier flow.
//
// A flow of UDP has expired when both sides are idle for longer than its timeout (bpf/config.h); one of TCP or SCTP
// when its server is. A server that has the connection acknowledges whatever its client sends, also keepalives. One
// that has lost it resets what it gets, but a client can choose numbers that make the RST look forged, or segments that
// servers ignore, so what the client sends says nothing. A timeout that follows from a FIN or RST begins with it for
// both sides.
//
// Run walks through the tables every five seconds, and within a second after flows have ended. It removes flows that
// have expired or ended: both their entries, and the client of a TCP flow that has ended gets a RST with the sequence
// number that it expects. The agent selects them from copies of the entries; the program sy_gc compares each with its
// copy right before it deletes, because another flow may have the key by then.
//
// Without an agent (none has written to sy_collector for 15 s) the programs remove flows themselves, when they store
// another one: the tables would fill with flows that have ended. A program cannot search a hash map for them; a timer
// in each entry (bpf_timer) does not fit into its two cache lines; and one timer that walks through a table would have
// to walk through all of it at once, because bpf_for_each_map_elem cannot continue where it stopped. So the keys of
// flows are in an array, five in a line, where eight lines follow from the hash of a key: a packet that stores a flow
// removes those of its lines that have ended or expired, and from eight lines at random when the table is full. Flows
// that are stored while an agent runs and less than half of the table is used have no place in the array: it costs
// nothing, and half of the table always remains for flows with one. An agent that returns removes all others. The
// tables of direct return are LRU maps, which need nobody.
//
// # Direct return
//
// By dsr and tunnel (IPIP, GUE) the servers answer clients directly (DSR), and the datapath receives one direction
// only. It avoids a lookup in a large table per packet: the hash of a packet selects a slot of the frontend's table,
// the same on every balancer, and a slot that has always had one backend needs no flow table. A slot that had other
// backends lists them (struct slot), and its packets look up their flow, which is written when it opens and refreshed
// by a sample of its packets. Slots keep their earlier backends until cleanup; the cost is a lookup.
//
// The datapath also decapsulates GUE packets from tunnel_sources: a packet to an address of this node is passed to the
// stack. Health checks of servers with direct return request the VIP from one given server; the mark of their packets
// selects the server (probes.go).
//
// # Chained frontends
//
// The backends of a frontend with lb.NodeForwarding are nodes with a datapath like this one (Kubernetes nodes).
// The node that receives a packet reads one slot and sends the packet unchanged to the node in it; it neither looks up
// nor writes a flow (bpf/spread.h). The target node has a second frontend for the same port (lb.Frontend.Decap) with
// its local pods, and keeps the flow.
//
// A slot lists up to three nodes that had it before. They are sent along in the private data of GUE (bpf/encap.h). A
// node that receives a packet of an unknown flow passes it to the next node of the list. Three nodes cover changes that
// follow each other faster than connections end. The list only becomes shorter, so there are no loops. The last node
// refuses a packet of an unknown flow; a datagram returns to the first node, which opens the flow. A packet without a
// list is looked up once in the table of the node that received it, because the sender's table may be older. Only
// lb.FrontendPlan.Nodes are listed, never nodes that are down.
//
// Each first datagram of a flow would ask the earlier nodes for ever, because nothing marks it. So slots of UDP forget
// them after timeout_udp (services.settle). Until then each live flow had a datagram that the node of the slot relayed,
// and did not get back: it remembers those in sy_relays, of which a frontend may have as many entries as are free, and
// relays them on. A flow whose client was silent for longer, while its server sent, gets another endpoint.
//
// With affinity the slot follows from the client's address, and a node keeps the backend of a client. A connection of a
// client that the node of the slot does not know goes to the earlier nodes first, which open it if they know the
// client, and returns otherwise. Only nodes that accept new flows are asked, because others may be down. These slots
// forget no earlier nodes; for a client that the node of the slot knows, none is asked.
//
// A table of another size maps all flows to other slots, so the previous table is kept behind the new one. Flows that
// are open during two changes of size may be refused.
//
// sy_tc_in decapsulates such packets and continues with sy_tc_decap by a tail call. XDP leaves them to tc: it cannot
// pass the list of nodes to the stack together with the packet.
//
// # Tunnel keys
//
// The address of a node is no proof that a node sent a packet: pods behind masquerade have it, too. So the private data
// of GUE between nodes begins with a token of 64 bits, which follows from a key of the cluster (internal/table).
// decap_parse compares it with those of up to three keys: the current one, the one before and the one after it, so that
// nodes need not change keys at the same time.
//
// The token is the same for all packets of a key. It is not a MAC over the packet: those who can read the network of
// the nodes could replay a MAC for the flows that they see, and against them only encryption between nodes helps. Those
// who cannot read it must guess 64 bits. The comparison is not measurable; SipHash-1-3 over addresses and ports would
// cost 15 ns at each end.
//
// sy_tc_out drops packets to the tunnel port that our programs have not sent. Theirs have a mark (TUNNEL_MARK).
// Packets that sy_xdp sends do not pass tc.
//
// # Restart, crash, upgrade
//
// Maps and links are pinned under PinPath in a directory named after the schema, so the kernel forwards with or without
// an agent. The agent holds the links open, too: when pins are removed or hidden by another mount, nothing is detached,
// and they are pinned again (link.go). Open loads the programs of this binary with the pinned maps, and exchanges each
// program by an atomic link update. Ids of frontends and backends are read from the maps and do not change. A lock on
// the directory admits one agent at a time.
//
// A first start pins everything in a temporary directory, and publishes it by one rename(2). When Open fails, a first
// start leaves nothing, and a takeover gives each link the program of the earlier agent back (internal/pin).
//
// Open refuses the state of another schema, and changes nothing: its programs go on until "steelyard cleanup". The
// first release has no earlier one to take flows over from.
//
// # Tables of slots
//
// All tables are in one array of words (sy_slots); a frontend refers to its table by offset and size. A table is
// replaced as a whole: the new one is written through shared memory where no frontend refers to, and takes effect with
// the write of its frontend, so no packet reads a part of one, or the slots of one with the size of another. The words
// of the old one are assigned again after a grace period (internal/table).
//
// The array, and those of backends and counters, grow by chunks: arrays of one size. Memory follows the
// configuration without a restart. A map of its own per table costs a system call that waits 13 ms for
// each change, a file and a pin per frontend, and lookups that the verifier cannot inline.
//
// # Hash
//
// The hash of a flow is NH with keys that follow from Options.HashSeed: two or five multiplications, and nobody without
// the seed can choose flows that all get one backend.
//
// # Changes to the node
//
// bpf_fib_lookup resolves only as from an interface that forwards. The programs ask as from lo, the only interface on
// which an appliance switches forwarding on: uplinks that forwarded would route clients into the network of the
// servers. On a Kubernetes node (Options.Delivers) the stack forwards to the pods, so there forwarding is enabled on
// the uplinks; accept_ra changes from 1 to 2, because an interface that forwards otherwise ignores router
// advertisements. The earlier values are kept in StateDir, and Cleanup restores them.
//
// IPv4 packets without DF that are larger than the path, by nat or IPIP, are handed to the kernel as if they had
// arrived on lo, and it forwards and fragments them (bpf/act_tc.h); for their sources accept_local is set there. By dsr
// they could not be routed, and the fragments of GUE packets would not be joined where this datapath receives them:
// there the sender gets the ICMP error, as with DF.
//
// # Verification
//
// A VIP is announced only while its packets would be forwarded and answered (verify.go). After each change of links,
// addresses, routes, rules or forwarding, and every 250 ms for a part of the frontends, the agent checks that the links
// of its programs are on the interfaces and run them, that lo forwards, and what sy_explain returns for a made packet
// of each frontend: the verdict, the route to the backend, and the route of the reply. Programs, pins and sysctls are
// restored. What cannot be restored is a fault of the VIP once it lasted 200 ms, and ends when nothing was wrong for a
// second; the engine withdraws VIPs with a fault. 16 flows are tried, and a fault is that none would be answered. When
// those of one backend of several are not, the status says so (verify_backends.go). Health checks find it where their
// packets take the same way.
//
// A made packet changes nothing, and the notifications of the kernel are taken as hints only: after an overrun all is
// read again. Interfaces by which backends are reached get the programs when a backend or a route makes it so, because
// replies arrive there. They keep them for ten minutes after the last such route (attach_release.go): a route that
// comes and goes must not attach and detach programs.
//
// A route does not say whether its router is alive. Those to clients and backends are asked by ARP or NDP once a second
// (internal/route). When a router or the default route leads to backends that were on a link, one of them must answer
// a TCP handshake (verify_reroute.go): a default route hides that the right route is lost. For the same reason the made
// clients are such that no route but the default route has most of them (verify_made.go). What concerns some packets
// only is a warning and withdraws nothing (verify_warn.go): clients that have lost their route, packets that other
// nodes send here and that are not delivered, limits that are reached. Not verified are the filters and queues of an
// interface by which a packet leaves, and for backends on this node those of netfilter: a made packet does not pass
// them. Health checks and BGP sessions do.
//
// The programs use a next hop for at most 250 ms before they ask again (bpf/route.h), whether or not an agent runs.
package datapath
