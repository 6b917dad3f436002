// Package demo is the body of `steelyard demo`: a whole network on this machine, in namespaces, in which everything a
// load balancer is for happens before one's eyes, and is measured.
//
// What it guarantees:
//
//   - Everything shown was seen: a step looks at the router's kernel, at the servers' counters and at what clients were
//     answered, never at what the agents say of themselves alone. A step that does not see what it promises within its
//     time fails the demo, with what was expected, what was seen, and the agents' last words.
//   - The balancers are `steelyard run`, this very binary, each a process in a machine (package lab) of its own. The
//     router is this binary too (Router): a BGP speaker that installs what it learns as ECMP routes in its kernel, keeps
//     the routes of a neighbour that restarts gracefully (RFC 4724), and drops those of one whose link is down, as a
//     router out of a box does ("fast external fallover").
//   - Nothing stays: see package lab. Ctrl-C ends it at any moment.
//
// Choices a network engineer may ask about: the hold time is 3 s, the least BGP has; checks are every 200 ms with a
// timeout of 150 ms, two failures take a server out. A balancer loses its power, not its process, where the demo shows
// that another takes over: the death of the process alone interrupts nothing, which is shown too.
package demo
