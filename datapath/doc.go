// Package datapath forwards packets in the kernel. It implements lb.Datapath and knows nothing of where services come
// from or how their addresses are announced.
//
// # What the kernel holds
//
// Three programs on each uplink (and one that the second goes on with). sy_tc_in can do everything; sy_xdp is the fast path before it: what XDP cannot send itself
// (no neighbour entry yet, an egress without our XDP) it leaves untouched, uncommitted and uncounted, and tc finishes
// it. sy_tc_out sees what this machine itself sends: health checks that must go the way of traffic, and answers whose
// segment size must fit a tunnel. All, and sy_explain, are one C core: parse → decide → route → commit → act (bpf/). What is
// known of a packet is in a per-CPU map (bpf/scratch.h): it is too much for the stack, and functions that take it from there are
// verified once and not for each way that leads to them. decide only reads maps;
// commit is the only writer and runs once it is known that the packet can be sent, and before it is sent, because a flow
// may only be opened with a source port that is surely its own and taking one is a write that may fail.
//
// decide returns the entry of a known flow, so it is inlined and not a global function: a second lookup among a million
// flows would cost more than everything else together.
//
// # Flows
//
// A flow has an entry for each direction, in sy_halfopen (a small LRU) until the client has proved that it is there: it
// acknowledged the server's sequence number, or, with UDP, went on after an answer. Only then it enters flows, which is
// no LRU: a flood of packets from invented addresses can neither fill it nor push anybody out. Run ends flows that are
// silent for too long (bpf/config.h), and those to a backend that a plan calls Down: both entries go, and the client of
// a TCP flow gets a RST at the sequence number it waits for.
//
// When all source ports to a server are taken, a new flow pushes out one whose client has not proved itself.
//
// # Servers that answer clients themselves
//
// By dsr and tunnel (IPIP, GUE) we see one direction only, and a million lookups a second for it would be the dearest thing we
// do. So the hash of a packet says where it goes, on every balancer the same, and no table is read as long as a slot of the
// table has never had another backend. Where it has, it remembers that (struct slot), and packets in it look for their flow,
// which was written when it opened and is refreshed by a sample of its packets (bpf/dsr.h). Slots remember for good: they
// forget when the agent is told to clean up, and the price is a lookup.
//
// A tunnel ends here, too, for GUE from tunnel_sources: the packet goes on to the stack if it is for an address of this
// machine. Checks of such servers ask for the VIP on one given server; only the mark on their packets tells which (probes.go).
//
// # Nodes that spread and deliver alike
//
// A frontend with lb.FrontendPlan.NodeForwarding has machines for backends, each of which has a datapath like this one (Kubernetes
// nodes). Whichever a packet comes to reads one slot and sends the packet, untouched, to the machine there; it looks up and
// writes no flow (bpf/spread.h). That machine has a second frontend for the same port (lb.Frontend.Decap), with its own pods,
// and keeps the flow. A slot remembers up to three machines that had it before; they go along in the header of the tunnel (GUE's
// private data, bpf/encap.h), and a packet of a flow that a machine does not know is passed on to the next of them. DESIGN has
// one previous target; three outlive changes that come faster than connections end. A list only gets shorter, so no packet goes
// around in circles: what nobody knows is refused by the last machine asked or, a datagram, comes back to the first one, which
// opens the flow. A packet that named nobody is looked up in the table of the machine it came to, once: who sent it may not
// know yet what that one knows. Only lb.FrontendPlan.Nodes are remembered: nobody asks the dead.
//
// A table of another size has other slots for all flows, so the one before is kept behind it. Two changes of size within the
// life of a connection are more than is remembered.
//
// sy_tc_in takes such packets out of their tunnel and goes on with sy_tc_decap (a tail call): XDP leaves them to tc, for it
// could not hand them to the stack with what was said along with them.
//
// # Restart, crash, upgrade
//
// Maps and links are pinned under PinPath in a directory named after the schema, so the kernel forwards whether or not
// an agent runs. Open loads the programs of this binary against the pinned maps and swaps them in with an atomic link
// update; ids of frontends and backends are read back and stay. Only one agent at a time can hold the directory.
//
// A table is swapped as a whole (a new inner map, one write to the outer one) and carries its own size, so no packet
// sees half of one, or the slots of one with the size of another.
//
// # What it changes on the machine
//
// bpf_fib_lookup answers only on interfaces that forward, so forwarding is switched on for the uplinks, and for them
// only; accept_ra becomes 2 where it was 1, for a forwarding interface would stop to listen to routers. The old values
// are kept in StateDir and Cleanup puts them back.
package datapath
