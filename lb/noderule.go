package lb

import (
	"net/netip"
	"strings"
	"time"
)

// NodeRule says what a node does with new connections to one address and port of a Service, if it is the service proxy:
// those that the node and its pods open, and those from other machines to the node's own addresses. The VIPs that the
// node serves to other machines are in a Service instead.
type NodeRule struct {
	Name     string     `json:"service"` // namespace/name:port
	Addr     netip.Addr `json:"address"` // 0.0.0.0 or :: stands for all of the node's own addresses (a node port)
	Port     uint16     `json:"port"`
	Protocol Protocol   `json:"protocol"`
	// ClusterIP means that Addr is from the cluster's own range. Whole means that Addr belongs to Services, so that its
	// other ports are refused, as that of a ClusterIP or of a pool. Another Addr may be a machine's own.
	ClusterIP bool        `json:"cluster_ip,omitempty"`
	Whole     bool        `json:"-"`
	Inside    NodeChoice  `json:"inside"`            // for connections of the node and its pods
	Outside   *NodeChoice `json:"outside,omitempty"` // for those of other machines to this node, or nil to ignore them
	// Affinity is how long a client keeps its endpoint, or 0. It is common to all rules with Name.
	Affinity time.Duration `json:"-"`
	// Serving lists the endpoints that keep their UDP flows, although they may get no new ones.
	Serving []netip.AddrPort `json:"-"`
	// Ending lists the endpoints of TCP ports whose pods are terminating. Connections to an endpoint that leaves this
	// list are reset, because nothing answers there. Those to other endpoints that leave continue.
	Ending []netip.AddrPort `json:"-"`
	// Allow lists the sources that may connect, or is nil for all. Others are dropped.
	Allow []netip.Prefix `json:"allow,omitempty"`
}

// Service returns namespace/name.
func (r NodeRule) Service() string {
	service, _, _ := strings.Cut(r.Name, ":")
	return service
}

// NodeChoice is the set of endpoints of which a new connection gets one at random.
type NodeChoice struct {
	Endpoints []netip.AddrPort `json:"endpoints"` // in any order, without duplicates
	// Drop means that without an endpoint connections are dropped, because another node has one. Otherwise they are
	// refused.
	Drop bool `json:"drop,omitempty"`
}
