// Package traffic provides a lab's servers and clients: HTTP and echo servers, clients that send requests from a host,
// long-lived connections, ping, and the receiving end of direct return and tunnels.
//
// Every server and client runs in this process, on sockets of its host. A server is closed with its host. A Client has
// no state. It sends from its host, each request over a new connection.
//
// Reading order: http.go, echo.go, listener.go, direct.go (servers); client.go, stream.go, conns.go, ping.go (clients).
package traffic
