// Package l2 makes VIPs reachable on the local network. It replies to ARP requests (RFC 826) and neighbour
// solicitations (RFC 4861) for them with this node's MAC address, and sends gratuitous ARP (RFC 5227 §3) and
// unsolicited neighbour advertisements (RFC 4861 §7.2.6) when it starts to announce one.
//
// VIPs are never added to an interface. Replies for a VIP are sent on every interface in Options. After Set has
// returned, no reply is sent for a VIP that it left out.
//
// One node owns a VIP. There is no election between several nodes yet: this announcer replies for every VIP that it is
// given, so a VIP may be given to one node only. An address conflict (RFC 5227 §2.4) is logged and counted, and the VIP
// is kept.
//
// Solicitations are read from a packet socket, not from an ICMPv6 socket: neighbour unreachability detection sends
// solicitations by unicast to the VIP (RFC 4861 §7.3), which the network stack does not accept as a local address.
// Frames that do not parse are ignored: a broadcast frame with a wrong length must not end the loop.
//
// An interface that goes down, is deleted or is created is handled while running; a failing interface does not delay
// the others.
package l2
