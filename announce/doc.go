// Package announce makes VIPs reachable. Announcers are separate packages (announce/bgp, announce/l2) that do not
// depend on each other. Mux combines several into one lb.Announcer.
//
// Every announcer guarantees the following; package announcetest checks it:
//
//   - Set is complete and idempotent: afterwards, exactly the given VIPs are announced. A VIP in both sets stays
//     announced throughout.
//   - Set returns when this node has sent the resulting updates. A neighbour that is down, slow or misconfigured causes
//     no error and does not delay Set.
//   - An announcement that cannot be made results in an error that names its VIP, and does not affect others.
//   - Set may be called before Run; Run then starts with that set. Nothing is sent before the first Set, because after
//     a restart, an empty set would withdraw working routes.
//   - Run blocks until its context ends, then stops everything it started and returns nil. It does not withdraw VIPs;
//     call Set with an empty set first.
package announce
