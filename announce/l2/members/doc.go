// Package members tells the nodes of a segment from each other which of them are alive, and which VIPs each can serve
// and has. Failures are detected by SWIM (hashicorp/memberlist) over UDP and TCP, encrypted with keys that can be
// rotated. No other server is needed: with the API server away, the last known nodes continue.
//
// A member is identified by the address of its node. Only configured peers are read, and memberlist gets only what was
// sealed with a key, is small, and is well formed (transport.go). What a member says about VIPs
// travels as changes by gossip, within a few hundred milliseconds, and as a whole every pushPull, which repairs losses.
//
// A member that does not respond is reported as not alive within about 600 ms. That may be an error: on a loaded
// machine it is made on purpose rather than a late one. Whoever takes over an address probes for it first.
package members
