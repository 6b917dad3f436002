// Package bfd detects within a few hundred milliseconds that a router or the link to it has failed, with Bidirectional
// Forwarding Detection (RFC 5880) over one hop (RFC 5881) or several (RFC 5883). Routers detect failures of this node
// in the same way.
//
// In: the neighbours (Monitor.Set). Out: the state of each session (Monitor.Sessions) and an event for each change. The
// package depends on neither BGP nor routing.
//
// packet.go encodes packets and session.go is the state machine; both are pure. monitor.go has the sockets and timers.
//
//   - Asynchronous mode only. This node does not request demand mode. If the neighbour does, this node sends no
//     periodic packets while both sides are up (section 6.8.7), but answers polls. It refuses echo packets: its
//     required minimum echo receive interval is 0.
//   - Packets over one hop must arrive with a TTL of 255 (RFC 5881, section 5), on the interface that leads to the
//     neighbour (section 3), so only hosts on the link can forge them. Over several hops the TTL must match the
//     neighbour's distance (Neighbor.MinTTL). Authentication is not supported; authenticated packets are discarded.
//   - If a session has a device (an interface or VRF), its sockets are bound to it (device.go), so neighbours with
//     the same address on different devices have separate sessions.
//   - A planned shutdown sends AdminDown. The neighbour must not treat that as a failure (RFC 5882, section 3.2), but
//     FRR 8 and BIRD 2.0 do so.
//   - A session's intervals, multiplier and minimum TTL can change while the session is up, with a poll sequence
//     (section 6.8.3).
//   - The C bit is 0: the packets come from the agent, not the datapath, so if the agent is killed, the session fails
//     although the datapath still forwards. A router that follows RFC 5882, section 4.3.2, then ends the BGP session
//     without keeping the routes. To keep the routes of a killed agent, rather than detect a frozen one, use graceful
//     restart without BFD.
package bfd
