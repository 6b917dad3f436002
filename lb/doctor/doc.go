// Package doctor has the checks of "steelyard doctor". They ask the network what "steelyard status" cannot observe, and
// take seconds, so they run only on request.
//
// The agent runs them, because it has the raw sockets, the configuration and the state that they need, and often runs
// in another network namespace or container than the command. Without an agent, "steelyard doctor" says what "steelyard
// status" says.
//
// A check reports only what it has proof of. Silence is no proof, because hosts may ignore ping, and routers may answer
// nothing. So a check compares: small packets with large ones, one server with another, what arrives at the interface
// with what arrives at a socket. No check uses an address that is not this node's, and none changes anything here.
//
// Omitted are checks that the agent performs all the time (kernel features, programs ahead of ours, the tunnel's port
// between nodes, a server's address on lo).
package doctor
