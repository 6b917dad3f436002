// Package guard keeps the sessions with BGP peers (RFC 4271) and lets nothing that a peer sends reach the program that
// holds the routes, the backend.
//
// In: the peers (SetPeers), and for each established session a backend from which its UPDATEs come (Options.Attach).
// Out: sessions with the peers, events, and every UPDATE that was written. The package knows no gobgp: a backend is any
// BGP speaker on the loopback interface.
//
// Guarantees:
//
//   - A backend receives from here: one OPEN that is made anew of checked fields, KEEPALIVEs, and ROUTE-REFRESHs that
//     are made anew, one in 10 s for each family. It receives no UPDATE. Its sessions begin after those with the peers
//     are established, so that a failed handshake does not concern it.
//   - What a peer sends is discarded: it costs the time to read it, 8 MB/s at most, and no memory. It is counted
//     (Details). A malformed UPDATE is counted too, and ends no session: it changes nothing here (RFC 7606 intends the
//     same).
//   - A peer receives only UPDATEs of the families that it has offered, no default route, and End-of-RIB only if it has
//     graceful restart.
//   - Options.Sent is called after an UPDATE was written to the socket of the peer, in order.
//   - The reason of an end is known: NOTIFICATIONs of the peer in every state, our own, the hold time, or the error of
//     the connection.
//
// # A session
//
// The goroutine of a peer (peer.go) owns its state. Each connection, outgoing or accepted, has a goroutine (conn.go)
// that exchanges OPEN and asks the first for permission to go on, which resolves collisions (RFC 4271, section 6.8).
// A later connection is refused; one of a peer with a password replaces the session (peer.replaces).
//
// After the KEEPALIVE of the peer three goroutines run: from the peer, from the backend, and KEEPALIVEs. When one
// fails, all end, and the connection sends the NOTIFICATION. The hold time is enforced here, also 0, which gobgp v3
// lacks; the session with the backend has one of 18 hours.
//
// The end of one side ends the other: a NOTIFICATION of the backend is passed on after the UPDATEs before it; when the
// session with the peer ends, that with the backend is closed and Detach is called.
//
// # Sockets
//
// MD5 (RFC 2385), TTL security (RFC 5082), source address and device are those of the socket towards the peer. An
// accepted connection belongs to the peer with its source address, and for link-local addresses also its interface. It
// is refused if it has not arrived by the device of the peer. Each listening socket has the keys of all peers; the
// kernel finds them by address only, so that two peers with the same link-local address and different passwords must be
// connected to from here, which is always tried too.
//
// There is a listening socket for all interfaces that are in no VRF, and one for each device that is a VRF or in one
// (ownSockets): Linux gives connections of a VRF to sockets that are bound to it.
//
// An address of a Range that no peer has becomes one in Options.Unknown; the socket has a key for the whole range.
//
// The backend should refuse connections without the key of Backend: other processes could connect to it too.
package guard
