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
	// Port is the port to probe, which then decides about all ports of a backend; 0: every port of the service that the
	// type can probe, each deciding about itself.
	Port uint16
	// ServicePort is the first port of the service that the type can probe. It decides about the ports that the type
	// cannot probe. Required unless Type is CheckNone.
	ServicePort Port `json:",omitzero"`
	// Interval is the time between the starts of two probes of one backend; Timeout bounds one probe and is ≤ Interval.
	Interval, Timeout time.Duration
	// Rise and Fall are how many probes in a row must succeed or fail before a backend changes state; at least 1.
	// The first success of a backend without a state decides alone: a start takes one probe and not Rise of them.
	Rise, Fall int
	// Status are the HTTP status codes that mean success.
	Status []StatusRange
	// Body must occur in the response (http, https, udp, dns); "": any response.
	Body string
	// Send is the payload of a udp check.
	Send string
	// User runs the program of an exec check: a name or a number.
	User string
	// Host is the Host header (http, https, http2), the name to query (dns) or the authority (grpc); "": the address.
	// Without a TLSServerName it is also the name in the TLS handshake (RFC 6066 server_name).
	Host string
	// TLSServerName is the name that the certificate must carry (https, grpc). "": with TLSCA it is Host; without, the
	// certificate is not verified, because backends are probed by address, and grpc uses no TLS.
	TLSServerName string
	// TLSCA has the certificates, in PEM, one of which must have signed the server's (https, grpc). "": those of the
	// system.
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
	// Port is the service port whose Target is probed; zero: the check decides about all ports of the backend.
	Port Port
}

// BackendName returns the backend for logs: without a port when it serves each port of the service at its own.
func (k CheckKey) BackendName() string {
	if k.Backend.Port() == 0 {
		return k.Backend.Addr().String()
	}
	return k.Backend.String()
}

// keyOf returns the check that decides about port p of b.
func keyOf(s *Service, b Backend, p Port) CheckKey {
	k := CheckKey{Service: s.Name, Backend: b.ID()}
	if s.Check.Type != CheckNone && s.Check.Port == 0 && b.Port == 0 {
		k.Port = s.probedFor(p)
	}
	return k
}

// probedFor returns the port whose probe decides about p: the first with the same Target that the check can probe.
// Without one, as for a UDP port and an HTTP check, it is that of Check.ServicePort.
func (s *Service) probedFor(p Port) Port {
	for _, o := range s.Ports {
		if o.Target == p.Target && s.Check.Type.probes(o.Protocol) {
			return o.Port
		}
	}
	return s.Check.ServicePort
}

// probes reports whether a check of this type can probe a port of this protocol.
func (w CheckType) probes(p Protocol) bool {
	switch w {
	case CheckExec:
		return true
	case CheckUDP, CheckDNS:
		return p == UDP
	}
	return p == TCP
}

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
	// Presumed: what a new check is about works, as far as is known; it is healthy until Fall probes have failed.
	Presumed bool
	// ByRoot, with CheckHTTP: at an address of the loopback interface, who answers must be root.
	ByRoot bool
}

// Health is the result of a check, sent on each change of State, and when Weight or Reason of an unchanged state
// changes.
type Health struct {
	Key CheckKey
	// State is healthy, unhealthy, or draining: the backend says that it takes no new flows. It is unknown while a
	// backend without a state has failed, but less than Fall times.
	State State
	// Reason is a text for operators: "HTTP 200", "connection refused", "no response within 1s"
	Reason string
	// Err is the cause of the failure of the last probe, for errors.Is: ECONNREFUSED, context.DeadlineExceeded or
	// another one; nil when healthy. It is not encoded.
	Err error `json:"-"`
	// Weight is the weight that the backend reports (X-Load-Balancing-Endpoint-Weight), or -1.
	Weight int
	// At is when the state was entered.
	At time.Time
}

// Checks returns the checks of a service: one for each backend and port that is probed, none for CheckNone.
func Checks(s *Service) []Check {
	if s.Check.Type == CheckNone {
		return nil
	}
	var checks []Check
	s.eachChecked(func(key CheckKey, b Backend) {
		checks = append(checks, Check{
			Key: key, Target: s.target(key, b), VIP: probeVIP(s, b), Method: s.Method, Encap: s.Encap, Spec: s.Check,
		})
	})
	return checks
}

// eachChecked calls f for each backend and port that have a state of their own. Deleted backends have none.
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

// target returns the address and port that the check of key probes.
func (s *Service) target(key CheckKey, b Backend) netip.AddrPort {
	switch {
	case s.Check.Port != 0:
		return netip.AddrPortFrom(b.Addr, s.Check.Port)
	case key.Port != Port{}:
		return b.On(key.Port)
	}
	return b.On(s.Check.ServicePort)
}

// Earlier returns, for each of checks that old does not have, the check in old that decided about the same port of the
// same backend, if there was one. So the state of a backend outlives a change of its ports or of the port of its check.
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
