// Package traffic provides the servers and clients of a lab: HTTP and echo servers in a host, clients that send
// requests from a host, long-lived connections, ping, and the receiving end of direct return and of tunnels.
//
// Every server and client runs in this process, on sockets of its host. A server is closed with its host. A Client has
// no state: it sends from the host that it names, each request over a new connection.
//
// Reading order: http.go, echo.go, listener.go, direct.go (servers); client.go, stream.go, conns.go, ping.go (clients).
package traffic
