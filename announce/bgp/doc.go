// Package bgp announces VIPs to routers by BGP (RFC 4271; RFC 4760 for IPv6) with an embedded gobgp v3 server.
//
// In: the complete set of VIPs to announce (Speaker.Set). Out: routes at the peers, the state of the sessions (Peers)
// and metrics. The package has no notion of services or health, does not change routes of this node, and offers no
// gRPC API.
//
// Guarantees:
//
//   - Exactly the VIPs of Set are announced, both families over every session, with this node as next hop. Routes from
//     peers are rejected by the import policy, and the export policy accepts local routes only. A default route is
//     impossible: an aggregate has at least one bit.
//   - When Set returns, withdrawals are written to every session that carries the route, or two seconds have passed.
//   - When Run ends, peers have received CEASE, Administrative Shutdown. They remove the routes at once, because a
//     NOTIFICATION without the N bit of RFC 8538 ends graceful restart.
//   - With graceful restart, routes of a process that was killed stay until the next process has announced its first
//     Set, if that takes less than RestartTime. Then routes that are no longer announced are removed; no other route
//     is interrupted.
//
// # Next hops
//
// Routes of the family of the session have the local address of the session as next hop. Routes of the other family,
// and IPv6 routes over a link-local session, have the first global address of the interface that has the session's
// address, else NextHopV4 or NextHopV6 (policy.go). Without any of these they are not sent and PeerStatus has the
// reason; they are sent as soon as an address is added. IPv4 routes over IPv6 sessions have an IPv4 next hop, so that
// routers without RFC 8950 can use them.
//
// # Graceful restart
//
// RFC 4724, section 4.2: a peer removes the routes of this node when the new OPEN lacks the Forwarding State bit of
// their family, or when an End-of-RIB arrives before them. Hence:
//
//   - No peer is added to gobgp before the first Set, and then only with every route in place: the End-of-RIB cannot be
//     early.
//   - gobgp v3 sets the bit only for sessions of peers added with LocalRestarting, and clears that flag of all peers
//     once one such session is up. So a peer whose session has ended, or that waits for its session while another one
//     comes up, is removed from gobgp and added again (readd, readdWaiting). The bit is always correct: the datapath
//     forwards without this process. Both cases have a test that fails without this.
//   - Not covered: two peers that connect within the same fraction of a millisecond. The OPEN of the second could be
//     written after the flag was cleared and before it is set again; its routes would be missing until the first
//     UPDATE. This did not occur in 18 restarts with two routers.
//   - A next hop address that is added only after the session is up (IPv6 at boot) is announced after the End-of-RIB.
//
// # Working around gobgp v3.37.0
//
// The package works around limits of gobgp as follows. Tests against BIRD and FRR cover this, so that an upgrade with
// other behaviour fails:
//
//   - Reasons: its events have none. They are read from its log (gobgp_log.go). The text of a NOTIFICATION received
//     before the session is up, which gobgp discards, is obtained by a NOTIFICATION probe (notification_probe.go).
//   - Its log may call Fatal and Panic: neither ends the process here.
//   - Serve never returns: the timing hook ends its goroutine (server.go). One timer of gobgp may run for up to a
//     second after Run, when Run ends within a second of a session coming up.
//   - It keeps routes of peers in memory although they are rejected. Routers should be configured to export nothing to
//     this speaker.
//
// # Passwords
//
// A wrong TCP MD5 password is indistinguishable from a peer that is down: kernels drop such segments silently (RFC
// 2385). When the peer connects to us, the local kernel counts the dropped segments (md5_drops.go) and PeerStatus
// reports that the passwords differ. Otherwise it reports no response and the password as a possible cause. The counter
// is that of the whole network namespace.
package bgp
