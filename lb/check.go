package lb

import (
	"net/netip"
	"slices"
	"time"
)

// CheckSpec says what to ask the backends of a service, and how often. All fields are valid and defaulted: what reads
// a configuration fills them.
type CheckSpec struct {
	Type CheckType
	// Path is the path of an HTTP request; the program of an exec check; the service name of a gRPC check.
	Path string
	// Port is the port to ask; 0: the backend's own.
	Port uint16
	// Interval is the time between the starts of two probes of one backend; Timeout bounds one probe and is ≤ Interval.
	Interval, Timeout time.Duration
	// Rise and Fall are how many probes in a row must succeed or fail before a backend changes state; at least 1.
	// The very first probe decides alone, so that a start takes one probe and not Rise of them.
	Rise, Fall int
	// Status are the HTTP status codes that mean success.
	Status []StatusRange
	// Body must occur in the answer (http, https, udp, dns); "": any answer.
	Body string
	// Send is the payload of a udp check.
	Send string
	// Host is the Host header (http, https), the name to ask for (dns) or the authority (grpc); "": the address.
	Host string
	// TLSServerName is the name a certificate must carry (https, grpc). "": the certificate is not verified, for it
	// is asked for by address; grpc then speaks plain text.
	TLSServerName string
}

// StatusRange is an inclusive range of HTTP status codes.
type StatusRange struct{ From, To int }

// Contains reports whether code is in r.
func (r StatusRange) Contains(code int) bool { return r.From <= code && code <= r.To }

// CheckKey names one check: a backend as seen by one service.
type CheckKey struct {
	Service string
	Backend netip.AddrPort // Backend.ID
}

// Check is one thing to ask again and again.
type Check struct {
	Key CheckKey
	// Target is where to ask: the backend's address and the port to use.
	Target netip.AddrPort
	// VIP is the address to ask for when the check goes the way of the traffic (dsr, tunnel); else zero.
	VIP    netip.Addr
	Method Method // how the traffic goes there
	Encap  Encap
	Spec   CheckSpec
}

// Health is what a check found, sent on each change of State, and when Weight or Reason of an unchanged state changes.
type Health struct {
	Key   CheckKey
	State State // healthy or unhealthy
	// Reason is why, for people: "200 OK", "connection refused", "no answer within 1s".
	Reason string
	// Weight is what the backend says of itself (X-Load-Balancing-Endpoint-Weight), or -1.
	Weight int
	// At is when the state was entered.
	At time.Time
}

// Checks returns what must be asked to know the health of the backends of s, one check a backend, none for CheckNone.
func Checks(s *Service) []Check {
	if s.Check.Type == CheckNone || len(s.Ports) == 0 {
		return nil
	}
	checks := make([]Check, 0, len(s.Backends))
	for _, b := range s.Backends {
		target := b.On(s.Ports[0])
		if s.Check.Port != 0 {
			target = netip.AddrPortFrom(b.Addr, s.Check.Port)
		}
		c := Check{Key: CheckKey{s.Name, b.ID()}, Target: target, Method: s.Method, Encap: s.Encap, Spec: s.Check}
		if i := slices.IndexFunc(s.VIPs, func(v netip.Addr) bool { return s.serves(v, b) }); i >= 0 && (s.Method == MethodDSR || s.Method == MethodTunnel) {
			c.VIP = s.VIPs[i]
		}
		checks = append(checks, c)
	}
	return checks
}
