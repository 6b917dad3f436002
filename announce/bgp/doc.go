// Package bgp announces VIPs to routers by BGP (RFC 4271; RFC 4760 for IPv6), through an embedded gobgp v3 server.
//
// In: the VIPs to announce (Speaker.Set), whole. Out: routes at the peers, their state (Peers) and metrics. It knows
// nothing of services or health, does not touch this machine's routes, and offers no gRPC API.
//
// What it guarantees:
//
//   - Only what Set gave is announced, both families over every session, with this machine as next hop. What peers say is
//     rejected on its way in and could not get out: only own routes pass the export policy. There is no default route, for
//     an aggregate has at least one bit.
//   - When Set returns, withdrawals have been written to every session that has the route, or two seconds have passed.
//   - When Run ends, peers have been told CEASE, Administrative Shutdown: they drop our routes at once, for a
//     NOTIFICATION without the N bit of RFC 8538 ends graceful restart.
//   - With graceful restart the routes of a process that died stay until the next one has announced its first Set, as
//     long as that takes less than RestartTime; then those that it no longer announces go, and no other is ever away.
//
// # Next hops
//
// Routes of the family of the session have our address of the session as next hop. Those of the other family, and IPv6
// routes over a link-local session, have the first global address of the interface that has the session's address,
// else NextHopV4 or NextHopV6 (policy.go). Without any they are not sent, and PeerStatus says so; they follow when an
// address appears. IPv4 routes over IPv6 sessions have an IPv4 next hop, so that routers without RFC 8950 can use them.
//
// # Graceful restart
//
// RFC 4724, section 4.2: a peer forgets our routes as soon as the session is back, if the OPEN does not have the
// Forwarding State bit for their family, or when it gets an End-of-RIB without them. Hence:
//
//   - No peer is given to gobgp before the first Set, and then with every route in place: the End-of-RIB cannot be early.
//   - gobgp v3 sets the bit only in sessions of peers added with LocalRestarting, and once one such session is up it takes
//     the mark from all peers. So a peer whose session has ended, or that waits for its own while another's has come up,
//     is taken from gobgp and given back (renew, renewWaiting). For us the bit is always true: the datapath outlives this
//     process. Both have a test that fails without them.
//   - What remains: two peers that connect within the same fraction of a millisecond. The second one's OPEN could be
//     written after the mark was taken and before it was given back; its routes would then be away for as long as the
//     first UPDATE takes. Seen in none of 18 restarts with two routers.
//   - An address for the next hop that comes only after the session (IPv6 at boot) comes after the End-of-RIB too.
//
// # Working around gobgp v3.37.0
//
// It is used because it is the BGP that others run too. What it does not give is taken from where it can be had, and
// tested against BIRD and FRR, so that an upgrade that changes it does not pass:
//
//   - Reasons: its events have none. They are read from its log (log.go), and what a router says in a NOTIFICATION before
//     the session is up, which gobgp throws away, is found out by asking once more (why.go).
//   - Its log may call Fatal and Panic: neither ends anything here.
//   - Serve never returns: the timing hook ends its goroutine (server.go). One timer of gobgp may outlive Run for up to a
//     second, when Run ends within a second of a session coming up.
//   - It keeps what peers announce, though it is rejected: a full table is held in memory. Routers should be told to
//     export nothing to us.
//
// # Passwords
//
// A wrong TCP MD5 password looks like silence: kernels drop such segments without a word (RFC 2385). When the peer dials
// us, our own kernel counts what it drops, and PeerStatus says that the passwords differ; otherwise it says that
// nobody answers and that the password is one thing to check. The counter is that of the whole network namespace.
package bgp
