// Package members lets the nodes of a segment know which of them are alive, and which VIPs each can serve and has.
// Failures are detected by SWIM (hashicorp/memberlist) over UDP and TCP, encrypted with keys that can be rotated. No
// other server is needed: if the API server is unreachable, the last known nodes continue.
//
// A member is identified by its node's address. Only messages from configured peers are read, and memberlist receives
// only messages that are sealed with a key, small and well formed (transport.go). Claims to VIPs travel as changes by
// gossip, within a few hundred milliseconds, and as a whole every pushPull, which repairs losses.
//
// A member that does not respond is reported as not alive within about 600 ms. This may be wrong: on a loaded machine,
// a false report is deliberately preferred to a late one. A node that takes over an address probes for it first.
package members
