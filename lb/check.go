package lb

import (
	"net/netip"
	"slices"
	"time"
)

// CheckSpec says how and how often the backends of a service are probed. The service's source has validated all fields
// and set their defaults.
type CheckSpec struct {
	Type CheckType
	// Path is the path of an HTTP request, the program of an exec check, or the service name of a gRPC check.
	Path string
	// Port is the port to probe; its result applies to all ports of a backend. 0 means every port of the service that
	// the type can probe, each with its own result.
	Port uint16
	// ServicePort is the first port of the service that the type can probe. Its result also applies to the ports that
	// the type cannot probe. Required unless Type is CheckNone.
	ServicePort Port `json:",omitzero"`
	// Interval is the time between the starts of two probes of a backend. Timeout bounds a probe and is ≤ Interval.
	Interval, Timeout time.Duration
	// Rise and Fall are how many consecutive probes must succeed or fail before a backend changes state; at least 1.
	// For a backend without a state one success is enough, so that a start takes one probe, not Rise.
	Rise, Fall int
	// Presumed means that a backend without a state counts as healthy until Fall probes have failed.
	Presumed bool `json:",omitzero"`
	// Status are the HTTP status codes that mean success.
	Status []StatusRange
	// Body must occur in the response (http, https, udp, dns). If it is "", any response will do.
	Body string
	// Send is the payload of a udp check.
	Send string
	// User is the user, by name or number, that runs the program of an exec check.
	User string
	// Host is the Host header (http, https, http2), the name to query (dns) or the authority (grpc). If it is "", the
	// address is used. Without a TLSServerName it is also the name in the TLS handshake (RFC 6066 server_name).
	Host string
	// TLSServerName is the name that the certificate must carry (https, grpc). If it is "" and TLSCA is set, Host is
	// used. With neither, the certificate is not verified, because backends are probed by address, and grpc does not
	// use TLS.
	TLSServerName string
	// TLSCA has the PEM certificates of the CAs that may have signed the server's (https, grpc). If it is "", the
	// system's CAs are used.
	TLSCA string
}

// StatusRange is an inclusive range of HTTP status codes.
type StatusRange struct{ From, To int }

// Contains reports whether code is in r.
func (r StatusRange) Contains(code int) bool { return r.From <= code && code <= r.To }

// CheckKey identifies one check: a backend of one service, at one of its ports.
type CheckKey struct {
	Service string
	Backend netip.AddrPort // Backend.ID
	// Port is the service port whose Target is probed. If it is zero, the result applies to all ports of the backend.
	Port Port
}

// BackendName returns the backend for logs, without a port if it serves each service port on the port's own Target.
func (k CheckKey) BackendName() string {
	if k.Backend.Port() == 0 {
		return k.Backend.Addr().String()
	}
	return k.Backend.String()
}

// keyOf returns the key of the check whose result applies to port p of b.
func keyOf(s *Service, b Backend, p Port) CheckKey {
	k := CheckKey{Service: s.Name, Backend: b.ID()}
	if s.Check.Type != CheckNone && s.Check.Port == 0 && b.Port == 0 {
		k.Port = s.probedFor(p)
	}
	return k
}

// probedFor returns the port whose result applies to p: the first with the same Target that the check can probe. If
// there is none, as for a UDP port with an HTTP check, it returns Check.ServicePort.
func (s *Service) probedFor(p Port) Port {
	for _, o := range s.Ports {
		if o.Target == p.Target && s.Check.Type.probes(o.Protocol) {
			return o.Port
		}
	}
	return s.Check.ServicePort
}

// probes reports whether a check of this type can probe a port with this protocol.
func (w CheckType) probes(p Protocol) bool {
	switch w {
	case CheckExec:
		return true
	case CheckUDP, CheckDNS:
		return p == UDP
	}
	return p == TCP
}

// Check is one repeated probe.
type Check struct {
	Key CheckKey
	// Target is the address and port to probe.
	Target netip.AddrPort
	// VIP is the destination address of the probe if it takes the path of service traffic (dsr, tunnel), or zero.
	VIP    netip.Addr
	Method Method // of the service
	Encap  Encap
	Spec   CheckSpec
	// Presumed means that a new target counts as healthy until Fall probes have failed.
	Presumed bool
	// ByRoot requires that a server at a loopback address runs as root. Only for CheckHTTP.
	ByRoot bool
}

// NoResponse is the beginning of the Reason of a probe that timed out.
const NoResponse = "no response within "

// Health is the result of a check. It is sent when State changes, and when Weight or Reason changes within a state.
type Health struct {
	Key CheckKey
	// State is healthy, unhealthy, draining (the backend says that it takes no new flows), or unknown while a backend
	// without a state has failed fewer than Fall times.
	State State
	// Reason is a phrase for operators, such as "HTTP 200", "connection refused" or "no response within 1s".
	Reason string
	// Err is why the last probe failed, for errors.Is: ECONNREFUSED, context.DeadlineExceeded or another error. It is
	// nil when healthy. It is not encoded.
	Err error `json:"-"`
	// Weight is the weight that the backend reports (X-Load-Balancing-Endpoint-Weight), or -1.
	Weight int
	// At is when the backend entered the state.
	At time.Time
}

// Checks returns the checks of a service: one for each backend and port that is probed, or none with CheckNone.
func Checks(s *Service) []Check {
	if s.Check.Type == CheckNone {
		return nil
	}
	var checks []Check
	s.eachChecked(func(key CheckKey, b Backend) {
		checks = append(checks, Check{
			Key: key, Target: s.target(key, b), VIP: probeVIP(s, b), Method: s.Method, Encap: s.Encap, Spec: s.Check,
			Presumed: s.Check.Presumed,
		})
	})
	return checks
}

// ProbeDirectly returns a TCP check, for a service whose source no longer says which backends exist. A service without
// ports, or with a port other than TCP, keeps its own check.
func ProbeDirectly(s *Service) CheckSpec {
	if len(s.Ports) == 0 || slices.ContainsFunc(s.Ports, func(p ServicePort) bool { return p.Protocol != TCP }) {
		return s.Check
	}
	return CheckSpec{
		Type: CheckTCP, Interval: 2 * time.Second, Timeout: time.Second, Rise: 1, Fall: 2, ServicePort: s.Ports[0].Port,
	}
}

// eachChecked calls f once for each check of s. Deleted backends are not checked.
func (s *Service) eachChecked(f func(CheckKey, Backend)) {
	seen := map[CheckKey]bool{}
	for _, p := range s.Ports {
		for _, b := range p.Backends {
			if key := keyOf(s, b, p.Port); !b.Deleted && !seen[key] {
				seen[key] = true
				f(key, b)
			}
		}
	}
}

// served returns, for each check, where its backend receives the packets of the ports that the check applies to.
func (s *Service) served() map[CheckKey][]netip.AddrPort {
	all := map[CheckKey][]netip.AddrPort{}
	for _, p := range s.Ports {
		for _, b := range p.Backends {
			key, at := keyOf(s, b, p.Port), b.On(p.Port)
			if !slices.Contains(all[key], at) {
				all[key] = append(all[key], at)
			}
		}
	}
	return all
}

// target returns the address and port to probe for key.
func (s *Service) target(key CheckKey, b Backend) netip.AddrPort {
	switch {
	case s.Check.Port != 0:
		return netip.AddrPortFrom(b.Addr, s.Check.Port)
	case key.Port != Port{}:
		return b.On(key.Port)
	}
	return b.On(s.Check.ServicePort)
}

// Earlier maps each check that old lacks to the check in old whose result applied to the same port of the same backend,
// if any. A backend's state thus survives a change of its ports or of the check's port.
func Earlier[V any](old map[CheckKey]V, checks []Check) map[CheckKey]CheckKey {
	earlier := map[CheckKey]CheckKey{}
	var of map[netip.AddrPort][]CheckKey // old, by backend
	for _, c := range checks {
		if _, ok := old[c.Key]; ok {
			continue
		}
		if of == nil {
			of = make(map[netip.AddrPort][]CheckKey, len(old))
			for k := range old {
				of[k.Backend] = append(of[k.Backend], k)
			}
		}
		for _, k := range of[c.Key.Backend] {
			same := k.Port == Port{} || c.Key.Port == Port{} || k.Port.Overlaps(c.Key.Port)
			if e, ok := earlier[c.Key]; same && (!ok || k.Port.Port < e.Port.Port) {
				earlier[c.Key] = k
			}
		}
	}
	return earlier
}

// probeVIP returns the first VIP that uses b if probes are sent to a VIP, or zero if they are sent to b itself.
func probeVIP(s *Service, b Backend) netip.Addr {
	if s.Method == MethodDSR || s.Method == MethodTunnel {
		for _, vip := range s.VIPs {
			if s.serves(vip, b) {
				return vip
			}
		}
	}
	return netip.Addr{}
}
