package lb

import (
	"net/netip"
	"slices"
	"time"
)

// Service is a service as configured by a user: VIPs, ports, and the backends that serve them. It is immutable once
// passed to a Sink. To change a service, put a new value with the same Name.
type Service struct {
	// Name identifies the service in every list, log line and metric: "web", or "namespace/name" from Kubernetes.
	Name string
	// Source is where the service comes from: "file" or "kubernetes". Two sources must not use the same name.
	Source string
	// VIPs are the addresses clients connect to, in the configured order, one or several per family.
	VIPs []netip.Addr
	// Refused lists addresses that the service does not get. They are only reported.
	Refused []RefusedVIP
	// Ports are the ports clients connect to, each with its backends; every port exists on every VIP.
	Ports []ServicePort
	// Policy is the external traffic policy: PolicyCluster, or PolicyLocal for only this node's backends. The source
	// chooses the backends accordingly; the engine only reports the Policy. (Kubernetes: externalTrafficPolicy.)
	Policy         Policy
	NodeForwarding NodeForwarding
	Algorithm      Algorithm
	// Method is how packets reach a backend or, with NodeForwarding, how the chosen node delivers them.
	Method Method
	// Encap is only used with MethodTunnel.
	Encap Encap `json:",omitzero"`
	// KeepSource lets backends see the client's address and port. They must route their replies through this node. Only
	// with MethodNAT.
	KeepSource bool
	// LocalClients balances connections that this machine opens to the VIPs. Only TCP with MethodNAT.
	LocalClients bool `json:",omitzero"`
	// Affinity is how long a client address keeps its backend after its last new flow. 0 means no affinity.
	Affinity time.Duration
	// Allow lists the sources that may connect. Empty means all. (Kubernetes: loadBalancerSourceRanges.)
	Allow []netip.Prefix
	// UnrestrictedVIPs are the VIPs that Allow does not apply to. (Kubernetes: externalIPs.)
	UnrestrictedVIPs []netip.Addr
	// MinHealthy is the number of healthy backends below which a VIP is not announced; at least 1.
	MinHealthy int
	// KeepAllDown sends new flows of a port without healthy backends to all that are not drained, and announces the VIP
	// with a lower preference, because probes may fail where clients do not. KeepUnanswered does so only while no
	// backend reports that it is draining.
	KeepAllDown, KeepUnanswered bool
	// KeepDown leaves the flows of an unhealthy backend open. A deleted backend loses its flows.
	KeepDown bool
	Check    CheckSpec
	// WithholdReason is why the VIPs must not be announced, whatever the backends' health, or "" if they may.
	WithholdReason string
	// LowerPreference is why routers should prefer other nodes that announce the VIPs, or "".
	LowerPreference string
	// WithholdIntended means that WithholdReason is not a fault of this node. Another node serves the service, this one
	// is excluded, or the service has no endpoints.
	WithholdIntended bool
	// Announce lists the announcers of the VIPs. Empty means every announcer that is on.
	Announce []AnnouncerKind
	// VIPPerNode asks for the VIPs of one family to be on different nodes if only one node at a time has a VIP.
	VIPPerNode bool
	// Frozen means that the source cannot read the service. The datapath keeps a previous run's frontends for the VIPs,
	// which are announced as long as it does.
	Frozen bool `json:",omitzero"`
	// PerVIP has settings for single VIPs, which may be in different pools.
	PerVIP map[netip.Addr]VIPRule `json:",omitempty"`
}

// Freeze returns the part of s that remains when only its VIPs can be used.
func (s *Service) Freeze() *Service {
	return &Service{Name: s.Name, Source: s.Source, VIPs: s.VIPs, Announce: s.Announce, PerVIP: s.PerVIP, Frozen: true}
}

// VIPsPerNodeMax is how many VIPs per family a pool can assign to a service with VIPPerNode.
const VIPsPerNodeMax = 16

// apart returns the VIPs in vip's family, including vip, that should be on different nodes.
func (s *Service) apart(vip netip.Addr) []netip.Addr {
	if !s.VIPPerNode {
		return nil
	}
	return slices.DeleteFunc(slices.Clone(s.VIPs), func(o netip.Addr) bool { return o.Is4() != vip.Is4() })
}

// VIPRule has the settings of a service for one of its VIPs.
type VIPRule struct {
	Announce       []AnnouncerKind `json:",omitempty"` // instead of Service.Announce; empty means every announcer
	WithholdReason string          `json:",omitempty"` // in addition to Service.WithholdReason
	// WithholdIntended is Service.WithholdIntended, for this WithholdReason.
	WithholdIntended bool `json:",omitempty"`
}

// announcers returns the announcers of a VIP. Empty means every announcer that is on.
func (s *Service) announcers(vip netip.Addr) []AnnouncerKind {
	if rule, ok := s.PerVIP[vip]; ok {
		return rule.Announce
	}
	return s.Announce
}

// NodeForwarding spreads flows over nodes instead of backends. Every node chooses the same node for a flow, in
// proportion to the usable backends there (Backend.Node), and forwards the packet to it unchanged in a GUE tunnel. The
// chosen node delivers the packet to one of its own backends with Service.Method.
type NodeForwarding struct {
	Enabled bool
	// AnyNode means that nodes may select different targets, so any node in ServicePort.Nodes may have an existing
	// flow, most likely one of the first.
	AnyNode bool
}

// forward returns how clients' packets reach their backends. The backend's node delivers with Method. If another node
// may choose the backend, packets reach the backend's node through a tunnel.
func (s *Service) forward() Method {
	elsewhere := func(b Backend) bool { return !b.Local && !b.Deleted }
	if s.NodeForwarding.Enabled && (s.Policy == PolicyCluster || slices.ContainsFunc(s.Ports, func(p ServicePort) bool {
		return slices.ContainsFunc(p.Backends, elsewhere)
	})) {
		return MethodTunnel
	}
	return s.Method
}

// serves reports whether a VIP uses b, a backend of its own family. A tunnel can also carry packets to a backend of the
// other family, and does so if the VIP's family has no backend.
func (s *Service) serves(vip netip.Addr, b Backend) bool {
	if b.Addr.Is4() == vip.Is4() {
		return true
	}
	return s.Method == MethodTunnel && !slices.ContainsFunc(s.Ports, func(p ServicePort) bool {
		return slices.ContainsFunc(p.Backends, func(o Backend) bool { return o.Addr.Is4() == vip.Is4() })
	})
}

// MaxWeight is the largest weight of a backend.
const MaxWeight = 1000

// Backend is one server. If its Port is zero, each port of the service uses its Target.
type Backend struct {
	Addr netip.Addr
	// Node is the address of the backend's node. Required by NodeForwarding; otherwise it may be zero.
	Node netip.Addr
	// Weight is the share of new flows relative to the other backends, 0 to MaxWeight. 0 means no new flows.
	Weight int
	Port   uint16
	// Drain means that the backend keeps existing flows and receives no new ones.
	Drain bool
	// Local means that the backend runs on this node; its packets keep their source address.
	Local bool
	// Deleted ends the backend's flows because it no longer exists or, for UDP, because it does not serve while others
	// do.
	Deleted bool
}

// ID identifies a backend within its service: its address, and its own port or 0.
func (b Backend) ID() netip.AddrPort { return netip.AddrPortFrom(b.Addr, b.Port) }

// On returns the address and port where b serves port p.
func (b Backend) On(p Port) netip.AddrPort {
	if b.Port != 0 {
		return netip.AddrPortFrom(b.Addr, b.Port)
	}
	return netip.AddrPortFrom(b.Addr, p.Target)
}

// Node is a node to which NodeForwarding can forward flows.
type Node struct {
	Addr  netip.Addr
	Local bool // whether it is this node
}
