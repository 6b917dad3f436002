// Package healthd probes backends and reports changes of their health. It does not depend on the receiver of the
// reports.
//
// In: checks per service (Prober.Put). Out: lb.Health, on each change only (Options.Report), and metrics.
//
//   - One goroutine runs each check. Probes start Interval apart, at a phase that follows from the key of the
//     check, so the checks of an interval stay spread over it.
//   - The first probe of a check without a state does not wait for its phase: it starts within a tenth of the
//     interval, at most 200 ms (more with over 2,000 checks). One success makes the backend healthy, Fall failures
//     make it unhealthy. After that the state changes after Rise or Fall probes in a row. Options.Earlier
//     continues the states of an earlier run, so that a restart is no worse than going on.
//   - A probe that takes longer than Interval delays the next one: probes of one check never overlap. Timeout
//     bounds a whole probe. A backend that fails is reported within Fall × Interval + Timeout.
//   - Half of the descriptors of the process may be in use by probes (slots). Those that failed before get half of
//     that, so backends that do not respond do not delay the others. steelyard_health_probes_late_total counts
//     delays.
//   - An error of this node (no descriptors, no memory, no local port, no permission) is inconclusive: the backend
//     keeps its state. Prober.Problems has such errors.
//
// A check without a port is one check per port of its service. The ports after the first may speak another protocol
// than the check (target.secondary): there http, https and grpc accept a server that responds in any.
//
// A probe is a function (Checker); the map in checker.go is the only list of check types.
//
// For dsr and tunnel a probe connects to the VIP on one server (lb.Check.VIP) over the path of the traffic; Options.Way
// returns the socket options for that. Checks of type exec and health-check-node-port use the server's own address.
//
// NodePorts and ProxyHealth are HTTP servers with the responses of kube-proxy.
package healthd
