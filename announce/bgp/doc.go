// Package bgp announces VIPs to routers over BGP (RFC 4271; RFC 4760 for IPv6) with an embedded gobgp v3 server behind
// a session guard (package guard).
//
// In: the complete set of VIPs to announce (Speaker.Set). Out: routes at the peers, the state of the sessions (Peers)
// and metrics. The package knows nothing of services or health, does not change this node's routes, and offers no gRPC
// API.
//
// Guarantees:
//
//   - Exactly the VIPs of Set are announced, both families over every session that has them, with this node as next
//     hop. Nothing is imported: no UPDATE from a peer reaches gobgp. A default route is impossible: an aggregate has at
//     least one bit, and the guard sends none.
//   - When Set returns, withdrawals are written to every session that carries the route, or two seconds have passed.
//   - When Run returns, peers have received CEASE, Administrative Shutdown. They remove the routes at once, because a
//     NOTIFICATION without the N bit of RFC 8538 ends graceful restart.
//   - With graceful restart, the routes of a killed process stay until the next process has announced its first
//     Set, if that takes less than RestartTime. Routes that are no longer announced are then removed; no other route is
//     interrupted.
//   - No message from a peer can crash the process through a bug in gobgp.
//
// # The guard
//
// gobgp v3 no longer receives fixes, and one UPDATE can crash its process (CVE-2026-41643 and others;
// TestPublishedAttacks). So gobgp has no contact with peers: the guard owns the TCP connections and the state machine,
// and gobgp is a route table that generates UPDATEs. Once a session is established, attach adds a passive peer to
// gobgp, and the guard connects to gobgp over the loopback interface. When the session ends, detach removes the passive
// peer.
//
//   - gobgp listens on 127.179.0.1 and a free port, and knows its peers by addresses in 127.179.0.0/16, which the guard
//     connects from. The routers' own addresses need not be unique: two links may use the same link-local address.
//   - Its connections use a random TCP MD5 key, so that no other process on this node can send it an UPDATE. Multipath
//     TCP does not support such keys, so go.mod turns it off. Sessions fail with this reason on kernels without them.
//   - gobgp negotiates graceful restart with the guard only to send End-of-RIB, which follows the first routes. The
//     capability sent to the peer comes from the guard. It always has the Forwarding State bits, correctly, because the
//     datapath forwards without this process. (RFC 4724, section 4.2: a peer removes the routes if they are missing.)
//
// Two simpler ways fall short: a policy that rejects peers' routes parses and stores them first, and a filter for
// malformed UPDATEs would have to know gobgp's bugs.
//
// # Peers without addresses
//
// A peer on an Interface has the address that package routeradv finds; until then it is the peer ::%interface. Peers in
// a ListenRange are created when they connect (connected) and removed some time after their session ends. All other
// code identifies peers by address only (resolved).
//
// # Next hops
//
// The next hop of routes in the session's own family is the session's local address. The next hop of routes in the
// other family, and of IPv6 routes over a link-local session, is the first global address of the interface that has the
// session's address, or otherwise NextHopV4 or NextHopV6 (policy.go). If none of these exists, the routes are not sent
// until an address is added, and PeerStatus says why. IPv4 routes over IPv6 sessions have an IPv4 next hop, so that
// routers without RFC 8950 can use them. For peers on an Interface, the link-local address is the next hop of both
// families (nextHopsNow).
//
// # Graceful restart
//
// RFC 4724, section 4.2: a peer also removes this node's routes if an End-of-RIB arrives before them. Hence no session
// starts before the first Set, and by then gobgp has every route. Routes whose next hop address is added only after the
// session is up (IPv6 at boot) are announced after the End-of-RIB.
//
// # Working around gobgp v3.37.0
//
//   - Its logger may call Fatal and Panic: neither ends the process here.
//   - Serve never returns: the timing hook ends its goroutine (server.go).
//   - It does not withdraw routes that a policy has begun to reject, so losing a next hop ends the session.
//
// # Passwords
//
// A wrong TCP MD5 password looks like a peer that is down, because kernels silently drop such segments (RFC 2385). When
// the peer connects to us, its segments show whether the passwords differ (signature.go): a raw socket receives copies
// of all segments, including those the local kernel drops. Otherwise PeerStatus reports no response and names the
// password as a possible cause.
package bgp
