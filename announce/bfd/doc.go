// Package bfd tells within some hundred milliseconds that a router, or the link to it, has failed, and lets the router
// notice the same of this node: Bidirectional Forwarding Detection (RFC 5880) over one hop (RFC 5881) and several (RFC
// 5883).
//
// In: the neighbours (Monitor.Set). Out: the state of each session (Monitor.Sessions) and an event for each change. The
// package knows neither BGP nor routes.
//
// packet.go has the packet, session.go the state machine; both are pure. monitor.go has sockets and timers.
//
//   - Asynchronous mode only. Demand mode is not requested; when the neighbour requests it, this node sends no periodic
//     packets while both sides are up (section 6.8.7) and answers polls. Echo packets are refused: the required minimum
//     echo receive interval is 0.
//   - Packets over one hop must arrive with a TTL of 255 (RFC 5881, section 5), by the interface that leads to the
//     neighbour (section 3), so nobody beyond the link can forge them. Over several hops the TTL must be that of the
//     neighbour's distance (Neighbor.MinTTL). Authentication is not offered; packets that have it are discarded.
//   - The sockets of a session with a device, an interface or a VRF, are bound to it (device.go), so neighbours with
//     the same address on different devices have sessions of their own.
//   - A planned end sends AdminDown. The neighbour must not take that for a failure (RFC 5882, section 3.2), but FRR 8
//     and BIRD 2.0 do.
//   - Intervals, the multiplier and the minimum TTL of a session can change while it is up, by a poll sequence (section
//     6.8.3).
//   - The C bit is 0: the agent sends the packets, and not the datapath, so the session fails when the agent is killed
//     although the datapath still forwards. A router that follows RFC 5882, section 4.3.2, then ends the BGP session
//     without keeping the routes. A node for which the restart of a killed agent matters more than the detection of a
//     frozen one does without BFD and has graceful restart.
package bfd
