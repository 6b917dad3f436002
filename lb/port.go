package lb

import (
	"fmt"
	"net/netip"
)

// Port maps the port a client connects to to the port of the backends.
type Port struct {
	Port uint16
	// Last is the last port of a range that begins with Port; 0: Port alone. Target is then the first port of the
	// backends' range.
	Last uint16
	// Target is used for backends that have no port of their own.
	Target   uint16
	Protocol Protocol
}

// ServicePort is a port of a service with its backends.
type ServicePort struct {
	Port
	// Backends serve the port. A VIP uses those of its own address family. Ports with the same backends may share
	// one slice, as those of a file do; with Kubernetes each port has its own endpoints (named target ports).
	Backends []Backend
	// Kept are the backends that keep their flows without getting new ones; nil: not known. Where they are known, the
	// flows that an earlier agent left to any other backend end.
	Kept []netip.AddrPort
	// DropWhenEmpty are the families of which new flows are dropped while no backend is usable; else they are refused.
	// (Kubernetes: policy Local, and only other nodes have endpoints.)
	DropWhenEmpty []Family `json:",omitempty"`
	// Nodes, with NodeForwarding, are the nodes that may have flows of this port, with backends for new flows or not.
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

// End is the last port: Last, or Port.
func (p Port) End() uint16 { return max(p.Port, p.Last) }

// Overlaps reports whether p and o have a port of one protocol in common.
func (p Port) Overlaps(o Port) bool {
	return p.Protocol == o.Protocol && p.Port <= o.End() && o.Port <= p.End()
}

// Name is "80/tcp" or "8000-8999/tcp".
func (p Port) Name() string {
	if p.Last != 0 {
		return fmt.Sprintf("%d-%d/%s", p.Port, p.Last, p.Protocol)
	}
	return fmt.Sprintf("%d/%s", p.Port, p.Protocol)
}

// On returns the frontend of p on a VIP.
func (p Port) On(vip netip.Addr) Frontend {
	return Frontend{VIP: vip, Port: p.Port, Last: p.Last, Protocol: p.Protocol}
}

// Frontend is one address, port or range of ports, and protocol that clients connect to.
type Frontend struct {
	VIP      netip.Addr
	Port     uint16
	Last     uint16 // of a range; 0: Port alone
	Protocol Protocol
	// Decap selects packets that another node forwarded to this one through a tunnel (NodeForwarding).
	Decap bool
}

// Ports is "80" or "8000-8999".
func (f Frontend) Ports() string {
	if f.Last != 0 {
		return fmt.Sprintf("%d-%d", f.Port, f.Last)
	}
	return fmt.Sprint(f.Port)
}

// String is "203.0.113.10:80/tcp", "[2001:db8::10]:80/tcp" or "203.0.113.10:8000-8999/tcp"; with Decap, " (decap)"
// follows.
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
