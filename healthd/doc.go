// Package healthd probes backends and reports changes of their health. It does not depend on the receiver of the
// reports.
//
// In: checks per service (Prober.Put). Out: lb.Health, only on changes (Options.Report), and metrics.
//
//   - One goroutine runs each check. Probes start Interval apart, at a phase derived from the check's key, so
//     the checks of an interval stay spread over it.
//   - The first probe of a check without a state does not wait for its phase: it starts within a tenth of the
//     interval, at most 200 ms (more with over 2,000 checks). One success makes the backend healthy, Fall failures
//     make it unhealthy. From then on the state changes after Rise or Fall probes in a row. Options.Earlier
//     carries over the states of a previous run, so that a restart is no worse than continuing.
//   - A probe that takes longer than Interval delays the next one: probes of a check never overlap. Timeout
//     limits a whole probe. A backend that fails is reported within Fall × Interval + Timeout.
//   - Probes may use half of the process's descriptors (slots). Checks that failed last time share half of
//     these, so unresponsive backends do not delay the others. steelyard_health_probes_late_total counts
//     delays.
//   - An error of this node (no descriptors, no memory, no local port, no permission) is inconclusive: the backend
//     keeps its state. Prober.Findings reports such errors.
//
// A check without a port stands for one check per port of its service. The ports after the first may speak another
// protocol than the check (target.secondary): there http, https and grpc accept a server that responds in any protocol.
//
// A probe is a function (Checker); the map in checker.go is the only list of check types.
//
// With dsr and tunnel a probe connects to the VIP on one server (lb.Check.VIP) over the path of service traffic;
// Options.Way returns the socket options for that. Checks of type exec and health-check-node-port use the server's own
// address.
//
// NodePorts and ProxyHealth are HTTP servers with kube-proxy's responses.
package healthd
