// Package l2 makes VIPs reachable on the local network. It replies to ARP requests (RFC 826) and neighbour
// solicitations (RFC 4861) for them with this node's MAC address, and sends gratuitous ARP (RFC 5227 §3) and
// unsolicited neighbour advertisements (RFC 4861 §7.2.6) when it starts to announce one.
//
// VIPs are never added to an interface. Replies for a VIP are sent on every interface in Options. After Set has
// returned, no reply is sent for a VIP that it left out.
//
// One host answers for a VIP. An announcer probes for a VIP before it announces it (RFC 5227 §2.1), and when another
// host answers, it does not announce it and probes again every second. A VIP that is announced is kept and defended
// (§2.4); such a conflict is logged, counted and reported. The times of §1.1 are shorter here, because clients wait.
//
// Without Members, the first of several nodes with one VIP has it, and of two that probe at the same time, the one with
// the lower MAC address. With Members, all nodes elect the same owner of each VIP (elect), only that one probes, and
// the others are on standby. What one node has it keeps: the owner of a VIP says so to the members, with a term that
// grows with each take-over. Members that do not respond may be alive, since the membership would rather err than be
// late: the probe tells, so an error moves no address. A node that hears nobody learns nothing from a probe, and waits
// (hearing.go). A VIP that Set removes is answered for, but not defended, until
// another member has it. After a partition of the members, the later term decides; while it lasts, two owners hear each
// other, and the order of the VIP decides (outranks).
//
// An owner announces its VIPs again after what may have replaced or kept away its announcements (refresh.go).
//
// VIPs of a service that asks for it (lb.Announcement.Apart) go to different nodes while there are enough, and to one
// that returned, if connections survive that (apart.go).
//
// A process that was stopped, or whose machine was suspended, has a queue of requests and no longer its VIPs: replies
// stop when the process has not run for suspendLimit, and VIPs are probed for again.
//
// ARP and neighbour messages are read from and written to packet sockets: neighbour unreachability detection sends
// solicitations by unicast to the VIP (RFC 4861 §7.3), which the network stack does not accept as a local address, and
// replies go to the MAC address of the host that asked, whatever the routing table has. The interface needs no IPv4
// address for ARP, and no link-local address for NDP. Frames for other MAC addresses and of VLANs without an interface
// here are ignored, and so are frames that do not parse: a broadcast frame with a wrong length must not end the loop.
//
// What anyone in the segment can cause is bounded: log lines and memory about conflicts, defence (once in 10 s per
// VIP). Frames that are not replies are paced. Of several interfaces in one segment the first one replies.
//
// An interface that goes down, is deleted or is created is handled while running; a failing interface does not delay
// the others.
package l2
