// Package bgp announces VIPs to routers by BGP (RFC 4271; RFC 4760 for IPv6) with an embedded gobgp v3 server behind a
// session guard (package guard).
//
// In: the complete set of VIPs to announce (Speaker.Set). Out: routes at the peers, the state of the sessions (Peers)
// and metrics. The package has no notion of services or health, does not change routes of this node, and offers no gRPC
// API.
//
// Guarantees:
//
//   - Exactly the VIPs of Set are announced, both families over every session that has them, with this node as next
//     hop. Nothing is imported: no UPDATE of a peer reaches gobgp. A default route is impossible: an aggregate has at
//     least one bit, and the guard sends none.
//   - When Set returns, withdrawals are written to every session that carries the route, or two seconds have passed.
//   - When Run ends, peers have received CEASE, Administrative Shutdown. They remove the routes at once, because a
//     NOTIFICATION without the N bit of RFC 8538 ends graceful restart.
//   - With graceful restart, routes of a process that was killed stay until the next process has announced its first
//     Set, if that takes less than RestartTime. Then routes that are no longer announced are removed; no other route is
//     interrupted.
//   - No message of a peer can end the process by a defect of gobgp.
//
// # The guard
//
// gobgp v3 gets no fixes, and one UPDATE can end its process (CVE-2026-41643 and others; TestPublishedAttacks). Hence
// it has no contact with peers: the guard owns the TCP connections and the state machine, and gobgp is a table of
// routes that makes UPDATEs. Once a session is established, attach adds a passive peer to gobgp, and the guard connects
// to it over the loopback interface. When the session ends, detach removes it.
//
//   - gobgp listens on 127.179.0.1 and a free port, and knows its peers by addresses of 127.179.0.0/16, which the guard
//     connects from. Those of the routers may be equal: link-local addresses of two links.
//   - Its connections have a random TCP MD5 key, so that no other process of this node can send it an UPDATE. Multipath
//     TCP has no such keys: go.mod turns it off. If the kernel has none either, sessions fail with this reason.
//   - gobgp negotiates graceful restart with the guard only to send End-of-RIB, which follows the first routes. The
//     capability towards the peer is made by the guard. It always has the Forwarding State bits, which is correct: the
//     datapath forwards without this process. (RFC 4724, section 4.2: a peer removes the routes when they are missing.)
//
// Two simpler ways do not give the same: rejecting the routes of peers by policy parses and stores them first, and a
// filter of malformed UPDATEs would have to know the defects of gobgp.
//
// # Peers without addresses
//
// A peer on an Interface has the address that package routeradv finds, and is the peer ::%interface until then. Peers
// of a ListenRange are made when they connect (connected) and removed a while after their session. Everything else
// knows peers by their address only (resolved).
//
// # Next hops
//
// Routes of the family of the session have the local address of the session as next hop. Routes of the other family,
// and IPv6 routes over a link-local session, have the first global address of the interface that has the session's
// address, else NextHopV4 or NextHopV6 (policy.go). Without any of these they are not sent and PeerStatus has the
// reason; they are sent as soon as an address is added. IPv4 routes over IPv6 sessions have an IPv4 next hop, so that
// routers without RFC 8950 can use them. Peers on an Interface have the link-local address for both families
// (nextHopsNow).
//
// # Graceful restart
//
// RFC 4724, section 4.2: a peer removes the routes of this node also when an End-of-RIB arrives before them. Hence no
// session begins before the first Set, and then with every route in gobgp. A next hop address that is added only after
// the session is up (IPv6 at boot) is announced after the End-of-RIB.
//
// # Working around gobgp v3.37.0
//
//   - Its log may call Fatal and Panic: neither ends the process here.
//   - Serve never returns: the timing hook ends its goroutine (server.go).
//   - It does not withdraw routes that a policy rejects now: a next hop that is lost ends the session.
//
// # Passwords
//
// A wrong TCP MD5 password is indistinguishable from a peer that is down: kernels drop such segments silently (RFC
// 2385). When the peer connects to us, its segments say whether the passwords differ (signature.go): a raw socket has
// copies also of those that the local kernel drops. Otherwise PeerStatus reports no response and the password as a
// possible cause.
package bgp
