// Package members tells the nodes of a segment which of them are alive, which VIPs each can serve, and which VIPs each
// owns. SWIM (hashicorp/memberlist) detects failures over UDP and TCP, encrypted with keys that can be rotated. No
// other server is needed: while the API server is unreachable, the last known nodes remain members.
//
// A member is identified by its node's address. Only messages from configured peers are read, and memberlist receives
// only messages that are sealed with a key, small and well formed (transport.go). Gossip spreads changes of the claims
// to VIPs within a few hundred milliseconds. Every pushPull, members exchange all claims, which repairs losses.
//
// A member that does not respond is reported as not alive within about 600 ms. This may be wrong: on a loaded machine,
// a false report is deliberately preferred to a late one. A node that takes over an address probes for it first.
package members
