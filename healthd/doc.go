// Package healthd asks backends how they are and reports changes. It knows nothing of who listens.
//
// One goroutine per check keeps its rhythm: probes start Interval apart, at a phase that follows from the check's key, so
// a thousand checks spread over the interval and stay so. The first probe comes at once (spread over a fraction of the
// interval when there are many) and decides alone; after that Rise or Fall probes in a row change the state. A probe that
// overruns its Interval delays the next one instead of piling up, and Timeout bounds everything a probe does. From the
// death of a server to the report pass at most Fall × Interval + Timeout.
//
// A probe is a function (Checker); the map in checker.go is the only list of them. At most 1,024 run at once, so ten
// thousand checks do not exhaust the files of the process.
//
// For dsr and tunnel a check asks for the VIP on that server (lb.Check.VIP), and its packets go the way of the traffic: who
// makes a Prober says how (Options.Way). An exec check and one of a health check node port ask for the server itself.
package healthd
