// Package guard maintains the sessions with BGP peers (RFC 4271) and keeps everything a peer sends away from the
// program that holds the routes, the backend.
//
// In: the peers (SetPeers), and for each established session a backend that supplies its UPDATEs (Options.Attach). Out:
// sessions with the peers, events, and every UPDATE that was written. The package does not depend on gobgp: a backend
// can be any BGP speaker on the loopback interface.
//
// Guarantees:
//
//   - A backend receives only an OPEN rebuilt from checked fields, KEEPALIVEs, and rebuilt ROUTE-REFRESHs, at most one
//     per family in 10 s. It receives no UPDATE. Its session starts only once the session with the peer is
//     established, so that a failed handshake does not affect it.
//   - Everything a peer sends is discarded: it costs the time to read it, 8 MB/s at most, and no memory. It is counted
//     (Details). A malformed UPDATE is also counted. It does not end the session, because it changes nothing here (RFC
//     7606 has the same intent).
//   - A peer receives only UPDATEs of the families it has offered, no default route, and End-of-RIB only if it supports
//     graceful restart.
//   - Options.Sent is called, in order, after an UPDATE was written to the peer's socket.
//   - The reason for the end of a session is known: the peer's NOTIFICATION, in every state, or ours, the hold time, or
//     the connection's error.
//
// # A session
//
// A peer's goroutine (peer.go) owns its state. Each connection, outgoing or accepted, has a goroutine (conn.go) that
// exchanges OPEN and then asks the peer's goroutine for permission to continue, which resolves collisions (RFC 4271,
// section 6.8). A later connection is refused, unless the peer has a password: then it may replace the session
// (conn.replaces).
//
// After the peer's KEEPALIVE three goroutines run: one reads from the peer, one from the backend, and one sends
// KEEPALIVEs. When one fails, all end, and the connection sends the NOTIFICATION. The hold time is enforced here,
// including 0, which gobgp v3 does not support; the session with the backend has a hold time of 18 hours.
//
// When one side ends, so does the other: a NOTIFICATION from the backend is passed on after the UPDATEs before it; when
// the session with the peer ends, the session with the backend is closed and Detach is called.
//
// # Sockets
//
// MD5 (RFC 2385), TTL security (RFC 5082), source address and device apply to the socket towards the peer. An accepted
// connection belongs to the peer with its source address and, for link-local addresses, its interface. It is refused
// unless it arrived on the peer's device. Each listening socket has the keys of all peers. The kernel looks them up by
// address only. So if two peers have the same link-local address and different passwords, this node must connect to
// them, which it always tries as well.
//
// There is one listening socket for all interfaces outside VRFs, and one for each device that is a VRF or in one
// (ownSockets), because Linux delivers connections in a VRF to sockets bound to it.
//
// When an address in a Range that is not yet a peer connects, Options.Unknown may make it one. The socket has a key for
// the whole range.
//
// The backend should refuse connections without Backend's key, because other processes could connect to it as well.
package guard
