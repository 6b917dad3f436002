// Package announce makes VIPs reachable. Announcers live in their own packages (announce/bgp, announce/l2) and know
// nothing of each other; Mux makes one lb.Announcer of several.
//
// What every announcer promises, and what announcetest checks:
//
//   - Set is whole and idempotent: after it, exactly the given VIPs are announced. A VIP that stays is never withdrawn
//     in between, not for a moment.
//   - Set returns when that is so as far as this machine can tell. A neighbour that is down, slow or wrong is no error
//     and does not delay Set.
//   - An announcement that cannot be announced is an error that names it; the others are announced all the same.
//   - Set may be called before Run: Run then starts with that set. Before the first Set nothing is said to anyone,
//     for an empty answer after a restart would withdraw what still works.
//   - Run blocks until its context ends and then returns nil, after everything it started has ended. Whoever wants
//     the routes gone calls Set with nothing first.
package announce
