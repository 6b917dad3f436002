// Package healthd probes backends and reports changes of their health. It does not depend on their receiver.
//
// In: checks per service (Prober.Put). Out: changes of lb.Health (Options.Report), and metrics.
//
//   - One goroutine runs each check. Probes start Interval apart, at a phase derived from the check's key, so the
//     checks stay spread over the interval.
//   - The first probe of a check without a state does not wait for its phase: it starts within a tenth of the interval,
//     or 200 ms if that is shorter (longer with over 2,000 checks). One success makes the backend healthy; Fall
//     failures make it unhealthy. After that, the state changes after Rise or Fall consecutive probes. Options.Earlier
//     carries over the states of a previous run, so that a restart is no worse than continuing.
//   - A probe that takes longer than Interval delays the next one: probes of a check never overlap. Timeout limits a
//     whole probe. A failed backend is reported within Fall × Interval + Timeout.
//   - Probes may use half of the process's descriptors (slots). Checks whose last probe failed share half of the slots,
//     so unresponsive backends do not delay other checks. steelyard_health_probes_late_total counts delays.
//   - An error of this node (no descriptors, no memory, no local port, no permission) is inconclusive: the backend
//     keeps its state. Prober.Findings reports such errors.
//
// A check without a port stands for one check per port of its service. The ports after the first may use a protocol
// other than the check's (target.secondary): there, http, https and grpc checks accept a response in any protocol.
//
// Each check type implements Checker; the map in checker.go is the only list of them.
//
// With dsr and tunnel, a probe connects to the VIP on one server (lb.Check.VIP) over the path of service traffic.
// Options.Way returns the socket options for this. Checks of type exec and health-check-node-port use the server's own
// address.
//
// NodePorts and ProxyHealth are HTTP servers that respond as kube-proxy does.
package healthd
