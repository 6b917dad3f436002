// Package guard maintains the sessions with BGP peers (RFC 4271) and isolates the program that has the routes, the
// backend, from everything that peers send.
//
// In: the peers (SetPeers), and for each established session a backend that supplies its UPDATEs (Options.Attach). Out:
// sessions with the peers, events, and every UPDATE that was written. The package does not depend on gobgp: any BGP
// speaker on the loopback interface can be a backend.
//
// Guarantees:
//
//   - A backend receives only an OPEN rebuilt from checked fields, KEEPALIVEs, and rebuilt ROUTE-REFRESHs, at most one
//     per family in 10 s. It receives no UPDATE. Its session starts only once the peer's session is established, so
//     failed handshakes do not affect it.
//   - The guard discards everything a peer sends. Reading is limited to 8 MB/s and uses no memory beyond a buffer.
//     Details counts the messages. A malformed UPDATE is counted, but does not end the session, because it changes
//     nothing here (RFC 7606 has the same intent).
//   - A peer receives UPDATEs only for the families it has offered, no default route, and End-of-RIB only if it
//     supports graceful restart.
//   - Options.Sent is called in order, after each UPDATE is written to the peer's socket or withheld.
//   - Every session's end has a known reason: the peer's NOTIFICATION, in every state, or ours, the hold time, or a
//     connection error.
//
// # A session
//
// A peer's goroutine (peer.go) owns its state. Each connection, outgoing or accepted, has a goroutine (conn.go) that
// exchanges OPEN and then asks the peer's goroutine for permission to continue, which resolves collisions (RFC 4271,
// section 6.8). Once there is a session, further connections are refused. If the peer has a password, however, they may
// replace the session (conn.replaces).
//
// After the peer's KEEPALIVE, three goroutines run: one reads from the peer, one reads from the backend, and one sends
// KEEPALIVEs. When one of them fails, all end, and the connection sends the NOTIFICATION. The guard enforces the hold
// time, including 0, which gobgp v3 does not support; the session with the backend has a hold time of 18 hours.
//
// When one side ends, so does the other. The guard passes a NOTIFICATION from the backend on after the backend's last
// UPDATEs. When the session with the peer ends, the guard closes the session with the backend and calls Detach.
//
// # Sockets
//
// MD5 (RFC 2385), TTL security (RFC 5082), source address and device apply to the socket towards the peer. An accepted
// connection belongs to the peer with its source address and, for link-local addresses, its interface. It is refused
// unless it arrived on the peer's device. Each listening socket has the keys of all peers, and the kernel finds them by
// address only. If two peers have the same link-local address but different passwords, sessions therefore depend on
// outgoing connections, which this node always tries as well.
//
// There is one listening socket for all interfaces outside VRFs, and one for each device that is a VRF or in one
// (ownSockets), because only sockets bound to such a device receive its connections.
//
// When a new address in a Range connects, Options.Unknown may make it a peer. The socket has a key for the whole range.
//
// The backend should refuse connections without Backend's key, because any local process can connect to it.
package guard
