package lb

import (
	"net/netip"
	"time"
)

// CheckSpec says how the backends of a service are probed, and how often. All fields are valid and have their defaults:
// the source of the service fills them.
type CheckSpec struct {
	Type CheckType
	// Path is the path of an HTTP request; the program of an exec check; the service name of a gRPC check.
	Path string
	// Port is the port to probe; 0: the backend's own, or the Target of ServicePort.
	Port uint16
	// ServicePort is the port of the service whose Target is probed. Required unless Type is CheckNone.
	ServicePort Port
	// Interval is the time between the starts of two probes of one backend; Timeout bounds one probe and is ≤ Interval.
	Interval, Timeout time.Duration
	// Rise and Fall are how many probes in a row must succeed or fail before a backend changes state; at least 1.
	// The first probe decides alone, so that a start takes one probe and not Rise of them.
	Rise, Fall int
	// Status are the HTTP status codes that mean success.
	Status []StatusRange
	// Body must occur in the response (http, https, udp, dns); "": any response.
	Body string
	// Send is the payload of a udp check.
	Send string
	// Host is the Host header (http, https), the name to query (dns) or the authority (grpc); "": the address.
	Host string
	// TLSServerName is the name that the certificate must carry (https, grpc). "": the certificate is not verified,
	// because backends are probed by address; grpc then uses no TLS.
	TLSServerName string
}

// StatusRange is an inclusive range of HTTP status codes.
type StatusRange struct{ From, To int }

// Contains reports whether code is in r.
func (r StatusRange) Contains(code int) bool { return r.From <= code && code <= r.To }

// CheckKey identifies one check: a backend of one service, at one of its ports.
type CheckKey struct {
	Service string
	Backend netip.AddrPort // Backend.ID
	// Port is the service port that the check is for; zero: the check decides for all ports of the backend. Checks
	// makes only the latter so far.
	Port Port
}

// keyOf returns the check that decides about b.
func keyOf(s *Service, b Backend) CheckKey { return CheckKey{Service: s.Name, Backend: b.ID()} }

// Check is one probe that is repeated.
type Check struct {
	Key CheckKey
	// Target is the address and port to probe.
	Target netip.AddrPort
	// VIP is the destination address of the probe when it is delivered as the traffic is (dsr, tunnel); else zero.
	VIP    netip.Addr
	Method Method // of the service
	Encap  Encap
	Spec   CheckSpec
}

// Health is the result of a check, sent on each change of State, and when Weight or Reason of an unchanged state
// changes.
type Health struct {
	Key   CheckKey
	State State // healthy or unhealthy
	// Reason is a text for operators: "HTTP 200", "connection refused", "no response within 1s"
	Reason string
	// Err is the error of the last probe of an unhealthy backend, for errors.Is; nil when healthy. It is not encoded.
	Err error `json:"-"`
	// Weight is the weight that the backend reports (X-Load-Balancing-Endpoint-Weight), or -1.
	Weight int
	// At is when the state was entered.
	At time.Time
}

// Checks returns the checks of a service: one for each backend, none for CheckNone.
func Checks(s *Service) []Check {
	if s.Check.Type == CheckNone || len(s.Ports) == 0 {
		return nil
	}
	backends := s.allBackends()
	checks := make([]Check, 0, len(backends))
	for _, b := range backends {
		target := b.On(s.Check.ServicePort)
		if s.Check.Port != 0 {
			target = netip.AddrPortFrom(b.Addr, s.Check.Port)
		}
		checks = append(checks, Check{
			Key: keyOf(s, b), Target: target, VIP: probeVIP(s, b), Method: s.Method, Encap: s.Encap, Spec: s.Check,
		})
	}
	return checks
}

// probeVIP returns the VIP to which probes of b are sent, the first that uses b; zero when they are sent to b itself.
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
