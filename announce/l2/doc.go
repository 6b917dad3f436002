// Package l2 makes VIPs reachable on the local network: it answers ARP (RFC 826) and neighbour solicitations (RFC 4861)
// for them with this machine's MAC, and tells everybody when it takes one over (RFC 5227 §3, RFC 4861 §7.2.6).
//
// VIPs are never put on an interface. A VIP is answered for on every interface that Options names. After Set has
// returned nothing is answered for a VIP that it left out.
//
// One machine owns a VIP. Who that is among several is not decided here yet: this announcer answers for all it is given,
// so only one machine may be given a VIP. Another one that claims a VIP is reported, and answered as RFC 5227 §2.4 (c)
// has it: the address is kept.
//
// Solicitations are read from a packet socket, not from an ICMPv6 socket: a neighbour that only wants to know whether
// we are still there asks the VIP itself by unicast (RFC 4861 §7.3), which the stack does not take for its own. Frames
// that do not parse are ignored; a broadcast frame that lies about its length must not end the loop.
//
// An interface that is down, gone or new is followed; one that fails never holds up another.
package l2
