package lab

import (
	"errors"
	"fmt"
	"net/netip"
	"slices"
)

// Shape is the size of a Topology. A zero number means one.
type Shape struct {
	Clients, Balancers, Servers int
	// Wired gives every load balancer its own link to the router, so that the router sees the loss of carrier when a
	// load balancer is powered off. Otherwise load balancers and servers share one Ethernet segment behind a switch.
	Wired bool
	// Links are the options of every link.
	Links LinkOptions
}

// Topology is the dual-stack network of most tests, with addresses from the documentation ranges:
//
//	client1 … ──── clients ────┐                          198.51.100.0/24, 2001:db8:100::/64: router .1, clients .11 …
//	                         router
//	                           │ segment ──── switch      192.0.2.0/24, 2001:db8:2::/64: router .1, balancers .11 …,
//	                           │           ┌────┼────┐    servers .21 …
//	                           │          lb1  lb2  s1 …
//
// If Wired, the servers' prefix is 192.0.2.0/25, and each load balancer has a link to the router: 192.0.2.128/30 and
// up, 2001:db8:2:i::/64. The router is the default gateway of all other hosts. 203.0.113.0/24 and 2001:db8:1::/64 are
// not assigned, and provide the tests' VIPs.
type Topology struct {
	*Lab
	Router *Host
	// Switches connect the links of the clients and of the segment.
	ClientSwitch, Switch        *Host
	Clients, Balancers, Servers []Node
}

type Node struct {
	*Host
	V4, V6 netip.Addr
	// Gateway4 and Gateway6 are the router's addresses on the node's link.
	Gateway4, Gateway6 netip.Addr
	// Port is the name of the interface at the other end of the link, on the switch or the router.
	Port string
}

// place is the other end of a node's link.
type place struct {
	bridge             *Host // nil for the router itself
	prefix4, prefix6   netip.Prefix
	gateway4, gateway6 netip.Addr
}

// NewTopology builds a Topology. If it fails, it closes what it has built.
func NewTopology(s Shape) (*Topology, error) {
	l, err := New()
	if err != nil {
		return nil, err
	}
	t := &Topology{Lab: l}
	if err := t.build(s); err != nil {
		return nil, errors.Join(fmt.Errorf("build the network: %w", err), l.Close())
	}
	return t, nil
}

func (t *Topology) build(s Shape) (err error) {
	if t.Router, err = t.Host("router"); err != nil {
		return err
	}
	if err := t.Router.Forward(); err != nil {
		return err
	}
	clients := place{prefix4: prefix("198.51.100.0/24"), prefix6: prefix("2001:db8:100::/64")}
	segment := place{prefix4: prefix("192.0.2.0/24"), prefix6: prefix("2001:db8:2::/64")}
	if s.Wired {
		segment.prefix4 = prefix("192.0.2.0/25")
	}
	if err := t.addSwitch(&clients, "clients", s.Links); err != nil {
		return err
	}
	if err := t.addSwitch(&segment, "segment", s.Links); err != nil {
		return err
	}
	t.ClientSwitch, t.Switch = clients.bridge, segment.bridge
	for i := range max(1, s.Clients) {
		if err := t.addNode(&t.Clients, fmt.Sprintf("client%d", i+1), clients, 11+i, s.Links); err != nil {
			return err
		}
	}
	for i := range max(1, s.Balancers) {
		p, n := segment, 11+i
		if s.Wired {
			p, n = wire(i), 2
		}
		if err := t.addNode(&t.Balancers, fmt.Sprintf("lb%d", i+1), p, n, s.Links); err != nil {
			return err
		}
	}
	for i := range max(1, s.Servers) {
		if err := t.addNode(&t.Servers, fmt.Sprintf("s%d", i+1), segment, 21+i, s.Links); err != nil {
			return err
		}
	}
	return nil
}

// gateways returns the router's addresses at p.
func (p place) gateways() []netip.Prefix {
	return []netip.Prefix{on(p.gateway4, p.prefix4), on(p.gateway6, p.prefix6)}
}

// addSwitch adds the switch of p, and a link from the router to it.
func (t *Topology) addSwitch(p *place, name string, o LinkOptions) (err error) {
	if p.bridge, err = t.Host(name); err != nil {
		return err
	}
	if err := p.bridge.Bridge("switch"); err != nil {
		return err
	}
	p.gateway4, p.gateway6 = nth(p.prefix4, 1), nth(p.prefix6, 1)
	return t.Link(
		End{Host: t.Router, Name: name, Addresses: p.gateways()},
		End{Host: p.bridge, Name: "router", Bridge: "switch"}, o)
}

// wire returns point-to-point link i to the router.
func wire(i int) place {
	p := place{
		prefix4: netip.PrefixFrom(netip.AddrFrom4([4]byte{192, 0, 2, byte(128 + 4*i)}), 30),
		prefix6: prefix(fmt.Sprintf("2001:db8:2:%x::/64", i+1)),
	}
	p.gateway4, p.gateway6 = nth(p.prefix4, 1), nth(p.prefix6, 1)
	return p
}

func (t *Topology) addNode(to *[]Node, name string, p place, n int, o LinkOptions) error {
	h, err := t.Host(name)
	if err != nil {
		return err
	}
	node := Node{
		Host: h, V4: nth(p.prefix4, n), V6: nth(p.prefix6, n), Gateway4: p.gateway4, Gateway6: p.gateway6, Port: name,
	}
	near := End{Host: h, Name: "eth0", Addresses: []netip.Prefix{on(node.V4, p.prefix4), on(node.V6, p.prefix6)}}
	far := End{Host: p.bridge, Name: node.Port, Bridge: "switch"}
	if p.bridge == nil {
		far = End{Host: t.Router, Name: node.Port, Addresses: p.gateways()}
	}
	if err := t.Link(near, far, o); err != nil {
		return err
	}
	*to = append(*to, node)
	return errors.Join(h.AddRoute(Default, node.Gateway4), h.AddRoute(Default6, node.Gateway6))
}

// At returns the node's IPv4 and IPv6 addresses, with this port.
func (n Node) At(port uint16) []netip.AddrPort {
	return []netip.AddrPort{netip.AddrPortFrom(n.V4, port), netip.AddrPortFrom(n.V6, port)}
}

// Gateways returns the router's addresses on the node's link.
func (n Node) Gateways() []netip.Addr { return []netip.Addr{n.Gateway4, n.Gateway6} }

func prefix(s string) netip.Prefix { return netip.MustParsePrefix(s) }

func on(a netip.Addr, p netip.Prefix) netip.Prefix { return netip.PrefixFrom(a, p.Bits()) }

// nth returns the n-th address of p. In an IPv6 address, n is written in decimal: ::11 is the eleventh.
func nth(p netip.Prefix, n int) netip.Addr {
	if p.Addr().Is6() {
		b := p.Addr().As16()
		b[15] = byte(n/10<<4 | n%10)
		return netip.AddrFrom16(b)
	}
	a := slices.Clone(p.Addr().AsSlice())
	a[3] += byte(n)
	addr, _ := netip.AddrFromSlice(a)
	return addr
}
