// Package l2 makes VIPs reachable on the local network. It replies to ARP requests (RFC 826) and neighbour
// solicitations (RFC 4861) for them with this node's MAC address, and sends gratuitous ARP (RFC 5227 §3) and
// unsolicited neighbour advertisements (RFC 4861 §7.2.6) when it starts to announce one.
//
// VIPs are never added to an interface. Replies for a VIP are sent on every interface in Options. Once Set has
// returned, no reply is sent for a VIP that it left out.
//
// One host answers for a VIP. An announcer probes for a VIP before announcing it (RFC 5227 §2.1). If another host
// answers, it does not announce the VIP and probes again every second. An announced VIP is kept and defended (§2.4);
// such a conflict is logged, counted and reported. The times of §1.1 are shorter here, because clients wait.
//
// Without Members, a VIP of several nodes belongs to the first of them or, if two probe at the same time, to the one
// with the lower MAC address. With Members, all nodes elect the same owner of each VIP (elect); only the owner probes,
// and the others are on standby. A node keeps the VIPs it has: the owner of a VIP tells the members, with a term that
// grows with each takeover. Members that do not respond may be alive, because the membership errs rather than being
// late; the probe then finds out, so an error moves no address. A node that hears nobody learns nothing from a probe,
// and waits (hearing.go). This node still answers for a VIP that Set removes, without defending it, until another
// member has it. After a partition of the members, the later term decides; while it lasts, two owners hear each other,
// and the order of the VIP decides (outranks).
//
// An owner announces its VIPs again after events that may have suppressed or overridden its announcements (refresh.go).
//
// If a service asks for it (lb.Announcement.Apart), its VIPs go to different nodes while there are enough. They also
// move to a node that has returned, if connections survive that (apart.go).
//
// A process that was stopped, or whose machine was suspended, has a queue of requests but may have lost its VIPs. So if
// the process has not run for suspendLimit, it stops replying and probes for the VIPs again.
//
// ARP and neighbour messages are read from and written to packet sockets, for two reasons: neighbour unreachability
// detection sends solicitations by unicast to the VIP (RFC 4861 §7.3), which the network stack does not accept as a
// local address, and replies must go to the MAC address of the host that asked, whatever the routing table says. The
// interface needs no IPv4 address for ARP and no link-local address for NDP. Frames for other MAC addresses or VLANs
// without an interface here are ignored, as are malformed frames: a broadcast frame with a wrong length must not end
// the loop.
//
// The effects that any host in the segment can cause are limited: log lines and memory for conflicts, and defence (once
// in 10 s per VIP). Frames that are not replies are paced. If several interfaces are in one segment, the first one
// replies.
//
// Interfaces may go down, be deleted or be created at run time. A failing interface does not delay the others.
package l2
