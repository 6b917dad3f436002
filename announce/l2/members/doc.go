// Package members tells the nodes of a segment which of them are alive, which VIPs each can serve, and which VIPs each
// owns. SWIM (hashicorp/memberlist) detects failures over UDP and TCP, encrypted with keys that can be rotated. It
// needs no other server: while the API server is unreachable, the last known nodes remain members.
//
// A member is identified by its node's address. It reads messages only from configured peers, and passes only sealed,
// small and well-formed messages to memberlist (transport.go). Gossip spreads changed claims to VIPs within a few
// hundred milliseconds. Every pushPull, members exchange all claims, which repairs losses.
//
// A member that does not respond is reported as not alive within about 600 ms. On a loaded machine this may be wrong,
// because a late report would be worse than a false one. A node therefore probes for an address before taking it over.
package members
