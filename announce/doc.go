// Package announce makes VIPs reachable. Announcers are separate packages (announce/bgp, announce/l2) that do not
// depend on each other; Mux combines several into one lb.Announcer.
//
// Every announcer guarantees the following; package announcetest checks it:
//
//   - Set is complete and idempotent: afterwards exactly the given VIPs are announced. A VIP that stays is never
//     withdrawn in between.
//   - Set returns when this node has sent the resulting updates. A neighbour that is down, slow or misconfigured is not
//     an error and does not delay Set.
//   - An announcement that cannot be made is an error that names its VIP. The others are announced regardless.
//   - Set may be called before Run; Run then starts with that set. Before the first Set nothing is sent, because an
//     empty set after a restart would withdraw routes that still work.
//   - Run blocks until its context ends, stops everything it started, and returns nil. Run does not withdraw: call
//     Set with an empty set first.
package announce
