// Package demo is `steelyard demo`: a network in namespaces of this machine, in which a load balancer is observed and
// measured through failures and maintenance.
//
// Guarantees:
//
//   - All output is observed: a step reads the routes of the router's kernel, the counters of the servers and the
//     responses to the clients, never only the status of the agents. A step that does not observe the expected result
//     in time fails the demo, with the expectation, the observation, and the end of the agents' logs.
//   - The balancers are `steelyard run`, this binary, each a process in its own host (package lab). The router is this
//     binary as well (Router): a BGP speaker that installs the routes it learns as ECMP routes in its kernel, keeps the
//     routes of a neighbour during its graceful restart (RFC 4724), and drops those of a neighbour whose link is down
//     ("fast external fallover").
//   - At the end it removes everything it created: see package lab. Ctrl-C ends it at any time.
//   - With --shell, the network stays until the user's shell ends (shell.go), with one of the incidents for practice
//     (incidents.go). Even SIGKILL leaves no process, because all are in a PID namespace.
//
// Parameters: the hold time is 3 s, the minimum of BGP (RFC 4271 §4.2); checks run every 200 ms, and a server is
// unhealthy after four failures in a row. The takeover by the other balancer is shown with a loss of power, because the
// end of the process alone does not interrupt traffic, as another step shows.
package demo
