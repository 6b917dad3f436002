// Package bgp announces VIPs to routers over BGP (RFC 4271; RFC 4760 for IPv6) with an embedded gobgp v3 server behind
// a session guard (package guard).
//
// In: the complete set of VIPs to announce (Speaker.Set). Out: routes at the peers, the state of the sessions (Peers)
// and metrics. The package does not depend on services or health, does not change this node's routes, and offers no
// gRPC API.
//
// Guarantees:
//
//   - Exactly the VIPs of Set are announced, with this node as next hop, each over every session with its family.
//     Nothing is imported: no UPDATE from a peer reaches gobgp. A default route is impossible: an aggregate has at
//     least one bit, and the guard sends none.
//   - When Set returns, withdrawals are written to every session that has the route, or two seconds have passed.
//   - When Run returns, it has sent CEASE, Administrative Shutdown. Peers then remove the routes immediately, because a
//     NOTIFICATION without the N bit of RFC 8538 ends graceful restart.
//   - With graceful restart, the routes of a killed process stay until the next process has announced its first Set, if
//     that takes less than RestartTime. Peers then remove routes that are no longer announced, without interrupting
//     others.
//   - A bug in gobgp cannot let a peer's message crash the process.
//
// # The guard
//
// gobgp v3 is unmaintained, and a single UPDATE can crash it (CVE-2026-41643 and others; TestPublishedAttacks). So
// gobgp has no contact with peers: the guard owns the TCP connections and the state machine, and gobgp is a route table
// that generates UPDATEs. Once a session is established, attach adds a passive peer to gobgp, and the guard connects to
// gobgp over the loopback interface. When the session ends, detach removes the passive peer.
//
//   - gobgp listens on 127.179.0.1 and a free port. It identifies its peers by the addresses in 127.179.0.0/16 from
//     which the guard connects, because the routers' own addresses need not be unique: two links may use the same
//     link-local address.
//   - Connections to gobgp use a random TCP MD5 key, so no other process on this node can send it an UPDATE. Multipath
//     TCP does not support such keys, so go.mod turns it off. On kernels without TCP MD5, sessions fail and report this
//     reason.
//   - gobgp negotiates graceful restart with the guard only to send End-of-RIB, which follows the first routes. The
//     guard sends its own capability to the peer. It always sets the Forwarding State bits, without which a peer
//     removes the routes (RFC 4724, section 4.2). This is correct, because the datapath forwards without this process.
//
// Two simpler designs are insufficient: a policy that rejects peers' routes parses and stores them first, and a filter
// for malformed UPDATEs would need to cover every bug in gobgp.
//
// # Peers without addresses
//
// Package routeradv finds the address of a peer on an Interface; until then the peer is ::%interface. Peers in a
// ListenRange are created when they connect (connected) and removed some time after their session ends. All other code
// identifies peers by address (resolved).
//
// # Next hops
//
// Routes in the session's own family have the session's local address as next hop. For routes in the other family, and
// IPv6 routes over a link-local session, it is the first global address of the interface with the session's address, or
// otherwise NextHopV4 or NextHopV6 (policy.go). If none of these exists, the routes are not sent until an address is
// added, and PeerStatus says why. IPv4 routes over IPv6 sessions have an IPv4 next hop, so that routers without RFC
// 8950 can use them. For peers on an Interface, the link-local address is the next hop of both families (nextHopsNow).
//
// # Graceful restart
//
// A peer also removes this node's routes if an End-of-RIB arrives before them (RFC 4724, section 4.2). Therefore no
// session starts until gobgp has every route of the first Set. Routes whose next hop is added only after the session
// comes up (IPv6 at boot) are announced after the End-of-RIB.
//
// # Working around gobgp v3.37.0
//
//   - Its logger may call Fatal and Panic; here, neither ends the process.
//   - Serve never returns: a timing hook ends its goroutine (server.go).
//   - It does not withdraw routes that a policy newly rejects, so losing a next hop ends the session.
//
// # Passwords
//
// A wrong TCP MD5 password looks like a peer that is down, because kernels silently drop such segments (RFC 2385). If
// the peer connects to us, its segments show whether the passwords differ (signature.go): a raw socket receives copies
// of all segments, including dropped ones. Otherwise PeerStatus reports no response and names the password as a
// possible cause.
package bgp
