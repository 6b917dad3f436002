// Package datapath forwards packets in the kernel. It implements lb.Datapath and knows nothing of where services come
// from or how their addresses are announced.
//
// # What the kernel holds
//
// Two programs on each uplink. sy_tc_in can do everything; sy_xdp is the fast path before it: what XDP cannot send itself
// (no neighbour entry yet, an egress without our XDP) it leaves untouched, uncommitted and uncounted, and tc finishes
// it. Both, and sy_explain, are one C core: parse → decide → route → commit → act (bpf/). decide only reads maps;
// commit is the only writer and runs once it is known that the packet can be sent, and before it is sent, because a flow
// may only be opened with a source port that is surely its own and taking one is a write that may fail.
//
// decide returns the entry of a known flow, so it is inlined and not a global function: a second lookup among a million
// flows would cost more than everything else together.
//
// # Flows
//
// A flow has an entry for each direction, in halfopen (a small LRU) until the client has proved that it is there: it
// acknowledged the server's sequence number, or, with UDP, went on after an answer. Only then it enters flows, which is
// no LRU: a flood of packets from invented addresses can neither fill it nor push anybody out. Run ends flows that are
// silent for too long (bpf/config.h), and those to a backend that a plan calls Dead: both entries go, and the client of
// a TCP flow gets a RST at the sequence number it waits for.
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
