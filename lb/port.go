package lb

import (
	"fmt"
	"net/netip"
)

// Port maps a client-facing port or port range to the backends' ports.
type Port struct {
	Port uint16
	// Last is the last port of a range that begins with Port, or 0 for Port alone. Target is then the first port of the
	// backends' range.
	Last uint16
	// Target is used for backends without their own port.
	Target   uint16
	Protocol Protocol
}

// ServicePort is a port of a service with its backends.
type ServicePort struct {
	Port
	// Backends serve the port. A VIP uses the backends of its own address family. Ports with the same backends may
	// share one slice, as ports from a file do. With Kubernetes each port has its own endpoints (named target ports).
	Backends []Backend
	// Kept lists the backends that keep their flows but receive no new ones, or is nil if unknown. If known, flows from
	// a previous run to any other backend end.
	Kept []netip.AddrPort
	// DropWhenEmpty lists the families whose new flows are dropped while no backend is usable. Otherwise they are
	// refused. (Kubernetes: policy Local, and only other nodes have endpoints.)
	DropWhenEmpty []Family `json:",omitempty"`
	// Nodes lists the nodes that may have flows of this port, with or without backends for new flows. Only with
	// NodeForwarding.
	Nodes []Node
}

// PortsOn returns the ports, all served by the same backends.
func PortsOn(backends []Backend, ports ...Port) []ServicePort {
	out := make([]ServicePort, len(ports))
	for i, p := range ports {
		out[i] = ServicePort{Port: p, Backends: backends}
	}
	return out
}

// End returns the last port: Last, or Port if it is not a range.
func (p Port) End() uint16 { return max(p.Port, p.Last) }

// Overlaps reports whether p and o have a port of the same protocol in common.
func (p Port) Overlaps(o Port) bool {
	return p.Protocol == o.Protocol && p.Port <= o.End() && o.Port <= p.End()
}

// Name returns "80/tcp" or "8000-8999/tcp".
func (p Port) Name() string {
	if p.Last != 0 {
		return fmt.Sprintf("%d-%d/%s", p.Port, p.Last, p.Protocol)
	}
	return fmt.Sprintf("%d/%s", p.Port, p.Protocol)
}

// On returns the frontend for p on a VIP.
func (p Port) On(vip netip.Addr) Frontend {
	return Frontend{VIP: vip, Port: p.Port, Last: p.Last, Protocol: p.Protocol}
}

// Frontend is an address, a port or port range, and a protocol that clients connect to.
type Frontend struct {
	VIP      netip.Addr
	Port     uint16
	Last     uint16 // of a range, or 0 for Port alone
	Protocol Protocol
	// Decap selects packets that another node forwarded to this one through a tunnel (NodeForwarding).
	Decap bool
}

// Ports returns "80" or "8000-8999".
func (f Frontend) Ports() string {
	if f.Last != 0 {
		return fmt.Sprintf("%d-%d", f.Port, f.Last)
	}
	return fmt.Sprint(f.Port)
}

// String returns "203.0.113.10:80/tcp", "[2001:db8::10]:80/tcp" or "203.0.113.10:8000-8999/tcp", followed by " (decap)"
// with Decap.
func (f Frontend) String() string {
	last, decap := "", ""
	if f.Last != 0 {
		last = fmt.Sprintf("-%d", f.Last)
	}
	if f.Decap {
		decap = " (decap)"
	}
	return fmt.Sprintf("%s%s/%s%s", netip.AddrPortFrom(f.VIP, f.Port), last, f.Protocol, decap)
}
