// Package l2 makes VIPs reachable on the local network. It replies to ARP requests (RFC 826) and neighbour
// solicitations (RFC 4861) for them with this node's MAC address, and sends gratuitous ARP (RFC 5227 §3) and
// unsolicited neighbour advertisements (RFC 4861 §7.2.6) when it starts to announce one.
//
// VIPs are never added to an interface. Replies for a VIP are sent on every interface in Options. After Set returns,
// there are no replies for VIPs that it removed.
//
// Only one host replies for a VIP. An announcer probes for a VIP before announcing it (RFC 5227 §2.1). If another host
// replies, the announcer probes again every second instead. It keeps and defends an announced VIP (§2.4), and logs,
// counts and reports such a conflict. Its times are shorter than in §1.1, because clients wait.
//
// Without Members, a VIP that several nodes announce belongs to the first of them or, if two probe simultaneously, to
// the one with the lower MAC address. With Members, all nodes elect the same owner of each VIP (elect). Only the owner
// probes; the others are on standby. A node keeps its VIPs: it reports them to the members, with a term that grows with
// each takeover. Members that do not respond may be alive, because a late failure report would be worse than a false
// one. The probe then detects the error, so no address moves. A node that hears nobody cannot rely on probes, and waits
// (hearing.go). After Set removes a VIP, this node replies for it, without defending it, until another member has it.
// During a partition of the members, two owners may hear each other; the VIP's order of nodes then decides (outranks).
// After the partition, the later term decides.
//
// An owner announces its VIPs again after events that may have suppressed or overridden previous announcements
// (refresh.go).
//
// If a service requests it (lb.Announcement.Apart), its VIPs are spread over different nodes as far as possible. They
// also move to a node that has returned, if connections survive that (apart.go).
//
// A process that was stopped, or whose machine was suspended, has queued requests but may have lost its VIPs. So if the
// process has not run for suspendLimit, it stops replying and probes for the VIPs again.
//
// Packet sockets read and write ARP and neighbour messages, for two reasons. Neighbour unreachability detection sends
// unicast solicitations to the VIP (RFC 4861 §7.3), which the network stack accepts only for local addresses. And
// replies must go to the MAC address of the requesting host, whatever the routing table says. The interface needs no
// IPv4 address for ARP and no link-local address for NDP. Frames for other MAC addresses or VLANs without an interface
// here are ignored, as are malformed frames: a broadcast frame with a wrong length must not end the loop.
//
// Log lines, memory for conflicts, and defence (once per VIP in 10 s) are limited, because any host in the segment can
// cause them. Frames other than replies are paced. If several interfaces are in one segment, only the first one
// replies.
//
// Interfaces may go down, be deleted or be created at run time. A failing interface does not delay the others.
package l2
