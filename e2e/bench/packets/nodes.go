package packets

import (
	"errors"
	"net/netip"

	"github.com/cilium/ebpf"

	"github.com/steelyard-lb/steelyard/datapath"
	"github.com/steelyard-lb/steelyard/datapath/dptest"
	"github.com/steelyard-lb/steelyard/e2e/lab"
	"github.com/steelyard-lb/steelyard/lb"
)

// Numbers of servers; with NAT, many flows require more servers.
const few, many = 10, 64

// vip returns the first address of one kind of services.
func vip(kind byte) netip.Addr { return netip.AddrFrom4([4]byte{100, 64 + kind, 0, 0}) }

var (
	vipIPIP, vipGUE, vipDSR, vipNAT = vip(0), vip(1), vip(2), vip(3)
	vipSpread, vipLocal, vipFull    = vip(4), vip(5), vip(6)
	vip6                            = netip.MustParseAddr("2001:db8:1::10")
)

// nth returns the n-th address after a.
func nth(a netip.Addr, n int) netip.Addr {
	b := a.As4()
	b[2], b[3] = b[2]+byte(n>>8), b[3]+byte(n)
	return netip.AddrFrom4(b)
}

// service returns a service with port 80 over TCP and UDP.
func service(vip netip.Addr, method lb.Method, encap lb.Encap, backends ...lb.Backend) *lb.Service {
	return &lb.Service{
		Name: vip.String(), VIPs: []netip.Addr{vip},
		Ports: lb.PortsOn(backends, lb.Port{Port: 80, Target: 80, Protocol: lb.TCP},
			lb.Port{Port: 80, Target: 80, Protocol: lb.UDP}),
		Algorithm: lb.AlgorithmMaglev, Method: method, Encap: encap, Check: lb.CheckSpec{Type: lb.CheckNone},
	}
}

func servers(n int, addr func(int) netip.Addr) (all []lb.Backend) {
	for i := range n {
		all = append(all, lb.Backend{Addr: addr(i), Weight: 1})
	}
	return all
}

// spreadService returns a service that sends flows to pods on other nodes.
func spreadService(vip netip.Addr) *lb.Service {
	s := service(vip, lb.MethodNAT, "")
	s.NodeForwarding.Enabled = true
	for i := range s.Ports {
		s.Ports[i].Nodes = []lb.Node{{Addr: self4, Local: true}}
		for k := range few {
			s.Ports[i].Backends = append(s.Ports[i].Backends,
				lb.Backend{Addr: pod(100 + k), Weight: 1, Node: server4(k)})
			s.Ports[i].Nodes = append(s.Ports[i].Nodes, lb.Node{Addr: server4(k)})
		}
	}
	return s
}

// localService returns a service that delivers flows to pods on this node.
func localService(vip netip.Addr) *lb.Service {
	s := service(vip, lb.MethodNAT, "")
	s.NodeForwarding.Enabled = true
	for i := range s.Ports {
		s.Ports[i].Nodes = []lb.Node{{Addr: self4, Local: true}}
		for k := range few {
			s.Ports[i].Backends = append(s.Ports[i].Backends,
				lb.Backend{Addr: pod(k), Weight: 1, Node: self4, Local: true})
		}
	}
	return s
}

// bench creates nodes when rows need them.
type bench struct {
	lab   *lab.Lab
	flows int
	nodes map[string]*node
	// recorded has the addresses of open flows as servers see them, by node name and protocol.
	recorded map[string]*ebpf.Map
}

func (b *bench) Close() error {
	var err error
	for _, n := range b.nodes {
		err = errors.Join(err, n.Close())
	}
	return errors.Join(err, b.lab.Close())
}

// node returns a node, and the recorded addresses of its flows.
func (b *bench) node(name string) (*node, error) {
	if n := b.nodes[name]; n != nil || name == "" {
		return n, nil
	}
	n, err := map[string]func() (*node, error){
		nodeEdge: b.edge, nodeKubernetes: b.kubernetes, nodeNew: b.new,
		nodeEdge + "100":         func() (*node, error) { return b.edgeOf(100) },
		nodeEdge + "10000":       func() (*node, error) { return b.edgeOf(10_000) },
		nodeKubernetes + "100":   func() (*node, error) { return b.kubernetesOf(100) },
		nodeKubernetes + "10000": func() (*node, error) { return b.kubernetesOf(10_000) },
	}[name]()
	if n != nil {
		b.nodes[name] = n
	}
	return n, err
}

const (
	nodeEdge       = "edge"       // forwards to servers on the link; NAT flows are open
	nodeKubernetes = "kubernetes" // delivers to its pods, where flows are open, and forwards to other nodes
	nodeNew        = "new"        // forwards to servers; no established flows, but all ports of vipFull are in use
)

// open opens flows on a node and records them.
func (b *bench) open(name string, o opening) (err error) {
	o.server.Src, o.server.Dst, o.server.Proto = netip.AddrPortFrom(server4(0), 80), netip.AddrPortFrom(self4, 80),
		o.client.Proto
	if o.recorded, err = newRecorded(o.flows); err != nil {
		return err
	}
	b.recorded[name+lb.Protocol(o.client.Proto).String()] = o.recorded
	return o.run()
}

func (b *bench) edge() (*node, error) {
	n, err := newNode(b.lab, b.flows, func(*datapath.Options) {})
	if err != nil {
		return n, err
	}
	err = n.put(
		service(vipIPIP, lb.MethodTunnel, lb.EncapIPIP, servers(few, server4)...),
		service(vipGUE, lb.MethodTunnel, lb.EncapGUE, servers(few, server4)...),
		service(vipDSR, lb.MethodDSR, "", servers(few, server4)...),
		service(vipNAT, lb.MethodNAT, "", servers(many, server4)...),
		service(vip6, lb.MethodTunnel, lb.EncapIPIP, servers(few, server6)...),
	)
	if err != nil {
		return n, err
	}
	xdp := hooked{hookXDP, n.xdp}
	err = b.open(nodeEdge, opening{n: n, there: xdp, back: xdp, client: toVIP(vipNAT, dptest.TCP), flows: b.flows})
	if err != nil {
		return n, err
	}
	return n, b.open(nodeEdge, opening{n: n, there: xdp, back: xdp, client: toVIP(vipNAT, dptest.UDP),
		flows: min(b.flows, flows64k)})
}

func (b *bench) kubernetes() (*node, error) {
	n, err := newNode(b.lab, b.flows, func(o *datapath.Options) { o.Delivers = true })
	if err != nil {
		return n, err
	}
	err = n.host.Do(func() error {
		var nodes []netip.Addr
		for i := range few {
			nodes = append(nodes, server4(i))
		}
		return n.dp.SetTunnelSources(nodes)
	})
	if err != nil {
		return n, err
	}
	if err := n.put(spreadService(vipSpread), localService(vipLocal)); err != nil {
		return n, err
	}
	in, out := hooked{hookTC, n.tcIn}, hooked{hookTC, n.tcOut}
	err = b.open(nodeKubernetes, opening{n: n, there: in, back: out, client: toVIP(vipLocal, dptest.TCP),
		flows: b.flows})
	if err != nil {
		return n, err
	}
	return n, b.open(nodeKubernetes, opening{n: n, there: in, back: out, client: toVIP(vipLocal, dptest.UDP),
		flows: min(b.flows, flows64k)})
}

func (b *bench) new() (*node, error) {
	// The smallest half-open table has less capacity than the servers have ports.
	n, err := newNode(b.lab, flows64k, func(*datapath.Options) {})
	if err != nil {
		return n, err
	}
	err = n.put(service(vipNAT, lb.MethodNAT, "", servers(few, server4)...),
		service(vipFull, lb.MethodNAT, "", servers(1, server4)...))
	if err != nil {
		return n, err
	}
	xdp := hooked{hookXDP, n.xdp}
	for range 4 { // each attempt tries only some of the ports
		err := b.open(nodeNew, opening{n: n, there: xdp, back: xdp, client: toVIP(vipFull, dptest.TCP),
			flows: flows64k})
		if err != nil {
			return n, err
		}
	}
	return n, nil
}

func (b *bench) edgeOf(count int) (*node, error) {
	n, err := newNode(b.lab, b.flows, func(*datapath.Options) {})
	if err != nil {
		return n, err
	}
	var all []*lb.Service
	for i := range count {
		all = append(all,
			tcpOnly(service(nth(vipIPIP, i), lb.MethodTunnel, lb.EncapIPIP, servers(few, server4)...)),
			tcpOnly(service(nth(vipNAT, i), lb.MethodNAT, "", servers(few, server4)...)))
	}
	if err := n.put(all...); err != nil {
		return n, err
	}
	xdp := hooked{hookXDP, n.xdp}
	return n, b.open(nodeEdge, opening{n: n, there: xdp, back: xdp, client: toVIP(vipNAT, dptest.TCP),
		flows: min(b.flows, flows64k), services: count})
}

func (b *bench) kubernetesOf(count int) (*node, error) {
	n, err := newNode(b.lab, b.flows, func(o *datapath.Options) { o.Delivers = true })
	if err != nil {
		return n, err
	}
	var all []*lb.Service
	for i := range count {
		all = append(all, tcpOnly(spreadService(nth(vipSpread, i))))
	}
	return n, n.put(all...)
}

func tcpOnly(s *lb.Service) *lb.Service {
	s.Ports = s.Ports[:1]
	return s
}
