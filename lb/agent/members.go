package agent

import (
	"fmt"
	"log/slog"
	"net/netip"
	"slices"
	"sync"
	"time"

	"github.com/vishvananda/netlink"

	"github.com/steelyard-lb/steelyard/announce/l2/members"
	"github.com/steelyard-lb/steelyard/config"
	"github.com/steelyard-lb/steelyard/lb"
	"github.com/steelyard-lb/steelyard/lb/kube"
)

// membership is the set of other nodes, from the file and the cluster, that announce by ARP and NDP. A nil membership
// is empty.
type membership struct {
	*members.Members
	port uint16
	log  *slog.Logger

	mu         sync.Mutex              // guards all below
	configured []netip.Addr            // from the file
	nodes      []netip.Addr            // from the cluster
	known      bool                    // nodes is known; without a cluster it is empty
	neighbours map[string]members.Peer // by MAC address
	read       time.Time               // when neighbours was read
}

// newMembership returns the membership that the configuration asks for, or nil if it asks for none.
func newMembership(c *config.Config, facts node, b *lb.Boundary, log *slog.Logger) (*membership, error) {
	if c.L2 == nil || len(c.L2.Members) == 0 && c.Kubernetes == nil {
		return nil, nil
	}
	if !facts.address().IsValid() {
		return nil, fmt.Errorf("l2.members: this node has no address; set node.address")
	}
	m := &membership{
		port: c.L2.Port, log: component(log, "members"), configured: c.L2.Members, known: c.Kubernetes == nil,
	}
	m.Members = members.New(members.Options{
		Name: facts.name, Address: facts.address(), Port: c.L2.Port, Boundary: b, Log: m.log,
	})
	m.updatePeers()
	if keys := memberKeys(c); len(keys) > 0 {
		return m, m.SetKeys(keys)
	}
	return m, nil
}

// memberKeys returns the keys from the files; the first signs sent messages. Without secrets for the members it returns
// the tunnels' secrets, because the same nodes have them.
func memberKeys(c *config.Config) (keys [][]byte) {
	secrets := c.L2.Secrets
	if c.L2.Unencrypted {
		return [][]byte{members.Unencrypted}
	}
	if len(secrets) == 0 {
		secrets = c.Datapath.TunnelKeys
	}
	for _, s := range secrets {
		keys = append(keys, []byte(s.Reveal()))
	}
	return keys
}

// setNodes sets the addresses of the cluster's nodes.
func (m *membership) setNodes(nodes []netip.Addr) {
	if m == nil {
		return
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	m.nodes, m.known = nodes, true
	m.updatePeers()
}

// updatePeers activates the members of the file and the nodes; m.mu is held.
func (m *membership) updatePeers() {
	if m.known {
		m.SetPeers(slices.Concat(m.configured, m.nodes))
	}
}

// setClusterKeys uses the cluster's keys, unless a file has some.
func (m *membership) setClusterKeys(c *config.Config, k kube.Keys) {
	if m == nil || len(memberKeys(c)) > 0 {
		return
	}
	if err := m.SetKeys(tunnelKeys(k).Accept); err != nil {
		m.log.Warn("keys of members not set", "err", err)
	}
}

// reload applies changed members and secrets of the file. It ignores either one if it was added or removed as a whole
// since startup (running).
func (m *membership) reload(running, next *config.Config) error {
	if m == nil || next.L2 == nil {
		return nil
	}
	if (len(running.L2.Members) > 0) == (len(next.L2.Members) > 0) {
		m.mu.Lock()
		m.configured = next.L2.Members
		m.updatePeers()
		m.mu.Unlock()
	}
	same := (len(running.L2.Secrets) > 0) == (len(next.L2.Secrets) > 0)
	if keys := memberKeys(next); same && len(keys) > 0 {
		return m.SetKeys(keys)
	}
	return nil
}

// OfMAC returns the member with a MAC address: one that has reported it, or one whose address the kernel has resolved
// to it. The latter is for members in the same segment that have never been reached.
func (m *membership) OfMAC(mac string) (members.Peer, bool) {
	if p, ok := m.Members.OfMAC(mac); ok {
		return p, true
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	if time.Since(m.read) > time.Second { // any host in the segment can cause calls
		m.neighbours, m.read = neighboursOf(m.Peers(netip.Addr{})), time.Now()
	}
	p, ok := m.neighbours[mac]
	return p, ok
}

// neighboursOf returns the members whose addresses the kernel has resolved, by MAC address.
func neighboursOf(peers []members.Peer) map[string]members.Peer {
	all, err := netlink.NeighList(0, netlink.FAMILY_ALL)
	if err != nil {
		return nil
	}
	of := map[string]members.Peer{}
	for _, n := range all {
		a, _ := netip.AddrFromSlice(n.IP)
		i := slices.IndexFunc(peers, func(p members.Peer) bool { return p.Address == a.Unmap() })
		if i >= 0 && len(n.HardwareAddr) == 6 {
			of[n.HardwareAddr.String()] = peers[i]
		}
	}
	return of
}

// memberGrace is how long a member may be away before it is a problem, because it may be restarting.
const memberGrace = 10 * time.Second

// findings returns the members that share a name, and members from the file that do not respond. A node of a cluster
// need not run an agent.
func (m *membership) findings() (all []lb.Finding) {
	if m == nil {
		return nil
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	for _, p := range m.Peers(netip.Addr{}) {
		if p.Alive && p.Twin {
			all = append(all, lb.FoundMemberName.About(p.Name,
				"two members of [l2] have the name %s: set node.name", p.Name))
		}
		if !p.Alive && slices.Contains(m.configured, p.Address) && time.Since(p.Since) > memberGrace {
			why := fmt.Sprintf("it is down, port %d is filtered (UDP or TCP), or it has a different secret", m.port)
			if p.Heard {
				why = "its messages arrive here, but this node's messages do not arrive there"
			}
			all = append(all, lb.FoundMemberAway.About(p.Address.String(),
				"member %s of [l2] has not responded since %s: %s", p.Address, p.Since.Format(time.RFC3339), why))
		}
	}
	return all
}

// status returns the members by address.
func (m *membership) status() (all []lb.MemberStatus) {
	if m == nil {
		return nil
	}
	for _, p := range m.Peers(netip.Addr{}) {
		s := lb.MemberStatus{
			Member: p.Address, Name: p.Name, State: lb.MemberDown, Since: p.Since, Ahead: p.Ahead.Seconds(),
			Within: p.Within.Seconds(),
		}
		switch {
		case p.Alive:
			s.State = lb.MemberUp
		case p.Heard:
			s.State = lb.MemberDeaf
		}
		all = append(all, s)
	}
	return all
}

// away returns where the members from the file that do not respond should.
func (m *membership) away() (all []netip.AddrPort) {
	if m == nil {
		return nil
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	for _, p := range m.Peers(netip.Addr{}) {
		if !p.Alive && slices.Contains(m.configured, p.Address) {
			all = append(all, netip.AddrPortFrom(p.Address, m.port))
		}
	}
	return all
}
