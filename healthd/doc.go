// Package healthd probes backends and reports changes of their health. It does not depend on the receiver of the
// reports.
//
// In: checks per service (Prober.Put). Out: lb.Health, on each change only (Options.Report), and metrics.
//
//   - One goroutine runs each check. Probes start Interval apart. The phase of the first probe follows from the key
//     of the check, so that many checks do not start together; jitter of up to 5 % shortens each gap and spreads them
//     further.
//   - The first probe determines the state alone; it starts within a tenth of the interval, at most 200 ms. After
//     that the state changes after Rise or Fall probes in a row.
//   - A probe that takes longer than Interval delays the next one: probes of one check never overlap. Timeout bounds a
//     whole probe. A backend that fails is reported within Fall × Interval + Timeout.
//   - At most 1,024 probes run at once, so that 10,000 checks do not exhaust the file descriptors of the process.
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
