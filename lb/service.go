package lb

import (
	"fmt"
	"net/netip"
	"slices"
	"time"
)

// Service is what a user asked for: traffic to these addresses and ports goes to these backends. It is immutable once
// handed to a Sink; a change is a new value with the same Name.
type Service struct {
	// Name identifies the service in every list, log line and metric: "web", or "namespace/name" from Kubernetes.
	Name string
	// Source is where it came from: "file" or "kube". Two sources may not use one name.
	Source string
	// VIPs are the addresses clients connect to, in the order asked for, one or several per family.
	VIPs []netip.Addr
	// Ports are the ports clients connect to; every port exists on every VIP.
	Ports []Port
	// Backends serve the traffic. A VIP uses the backends of its own address family (but see serves).
	Backends []Backend
	// Spread sends flows to the machines (Backend.Node) in proportion to the backends that they have, by Encap with the packet
	// untouched, and lets them deliver. Method is then how they do that.
	Spread bool
	// Nodes, with Spread, are those that may have flows of each of Ports, in their order, whether they have backends for new
	// ones or not. AnyNode says that not all choose the same machine for a flow, so that any of them may have it, and those
	// that come first most likely.
	Nodes   [][]Node
	AnyNode bool
	// PerPort, when not nil, has the backends of each of Ports, in their order, and Backends is nil. They are not checked: their
	// source says which may be used. (Kubernetes: named target ports.)
	PerPort   [][]Backend
	Algorithm Algorithm
	Method    Method
	// Encap is meaningful with MethodTunnel only.
	Encap Encap
	// Affinity is for how long a client address keeps its backend after its last new flow; 0: not at all.
	Affinity time.Duration
	// Allow lists the sources that may connect; empty: all. (Kubernetes: loadBalancerSourceRanges.)
	Allow []netip.Prefix
	// UnrestrictedVIPs are the VIPs that all sources may connect to, whatever Allow says. (Kubernetes: externalIPs.)
	UnrestrictedVIPs []netip.Addr
	// MinHealthy is the number of healthy backends below which a VIP is not announced; at least 1.
	MinHealthy int
	Check      CheckSpec
	// DropWhenEmpty drops new flows when there is no backend for them; else they are refused. (Kubernetes: Local, and endpoints are
	// elsewhere only.)
	DropWhenEmpty bool
	// WithholdReason is why the VIPs are not to be announced whatever the backends are; "": nothing speaks against it.
	WithholdReason string
	// Announce says by what the VIPs are announced; empty: by every announcer that is on.
	Announce []AnnouncerKind
}

// serves reports whether a VIP uses a backend: one of its own family. A tunnel carries packets of one family to a backend of
// the other, too, and does so when there is none of its own.
func (s *Service) serves(vip netip.Addr, b Backend) bool {
	if b.Addr.Is4() == vip.Is4() {
		return true
	}
	return s.Method == MethodTunnel && !slices.ContainsFunc(s.Backends, func(o Backend) bool { return o.Addr.Is4() == vip.Is4() })
}

// backendsOf returns what serves the i-th port.
func (s *Service) backendsOf(i int) []Backend {
	if s.PerPort != nil {
		return s.PerPort[i]
	}
	return s.Backends
}

// all returns every backend, each once.
func (s *Service) all() []Backend {
	if s.PerPort == nil {
		return s.Backends
	}
	var all []Backend
	for _, backends := range s.PerPort {
		for _, b := range backends {
			if !slices.ContainsFunc(all, func(o Backend) bool { return o.ID() == b.ID() }) {
				all = append(all, b)
			}
		}
	}
	return all
}

// Port maps the port a client connects to to the port of the backends.
type Port struct {
	Port uint16
	// Last is the last port of a range that begins with Port; 0: Port alone. Target is then where the range of the backends
	// begins.
	Last uint16
	// Target is used for backends that have no port of their own.
	Target   uint16
	Protocol Protocol
}

// End is the last port: Last, or Port.
func (p Port) End() uint16 { return max(p.Port, p.Last) }

// Overlaps reports whether p and o have a port in common.
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

// Backend is one server. Its zero Port means the Target of each port of the service.
type Backend struct {
	Addr netip.Addr
	Port uint16
	// Weight is the share of new flows relative to the other backends, 0 to 1000. 0 means no new flows.
	Weight int
	// Drain keeps existing flows and takes no new ones.
	Drain bool
	// Local says that it runs on this machine: its packets keep their source.
	Local bool
	// Node is the machine it runs on, one of several that spread and deliver alike; zero: it is reached by itself.
	Node netip.Addr
	// Deleted ends the flows it has: it is known not to be there any more.
	Deleted bool
}

// Node is one of several that spread and deliver alike.
type Node struct {
	Addr  netip.Addr
	Local bool // it is this one
}

// ID identifies a backend within its service: its address, and its own port or 0.
func (b Backend) ID() netip.AddrPort { return netip.AddrPortFrom(b.Addr, b.Port) }

// On returns where b serves port p.
func (b Backend) On(p Port) netip.AddrPort {
	if b.Port != 0 {
		return netip.AddrPortFrom(b.Addr, b.Port)
	}
	return netip.AddrPortFrom(b.Addr, p.Target)
}

// Frontend is one address, port or range of ports, and protocol that clients connect to.
type Frontend struct {
	VIP      netip.Addr
	Port     uint16
	Last     uint16 // of a range; 0: Port alone
	Protocol Protocol
	// Decap is for packets that another machine has sent here through a tunnel: they are to be delivered here.
	Decap bool
}

// Ports is "80" or "8000-8999".
func (f Frontend) Ports() string {
	if f.Last != 0 {
		return fmt.Sprintf("%d-%d", f.Port, f.Last)
	}
	return fmt.Sprint(f.Port)
}

// String is "203.0.113.10:80/tcp", "[2001:db8::10]:80/tcp" or "203.0.113.10:8000-8999/tcp".
func (f Frontend) String() string {
	inside := ""
	if f.Decap {
		inside = " (inside)"
	}
	if f.Last != 0 {
		return fmt.Sprintf("%s-%d/%s%s", netip.AddrPortFrom(f.VIP, f.Port), f.Last, f.Protocol, inside)
	}
	return fmt.Sprintf("%s/%s%s", netip.AddrPortFrom(f.VIP, f.Port), f.Protocol, inside)
}
