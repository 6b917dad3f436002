package demo

import (
	"context"
	"encoding/json"
	"fmt"
	"net/netip"
	"time"

	"github.com/steelyard-lb/steelyard/e2e/lab"
	"github.com/steelyard-lb/steelyard/e2e/lab/traffic"
)

const (
	routerASN   = 64500
	balancerASN = 64512
	webPort     = 80   // of the service
	serverPort  = 8080 // of the servers
	echoPort    = 7    // of both: long-lived connections
)

// The service's check. A server that refuses connections is unhealthy after four failures in a row, so within
// interval × fall + timeout = 1 s. Four, because this machine may be busy, and a false alarm resets connections.
const (
	checkInterval    = 200 * time.Millisecond
	checkTimeout     = 200 * time.Millisecond
	checkFall        = 4
	unhealthyTimeout = checkFall*checkInterval + checkTimeout
)

var (
	vip4 = netip.MustParseAddr("203.0.113.10")
	vip6 = netip.MustParseAddr("2001:db8:1::10")
	vips = []netip.Addr{vip4, vip6}
)

// network has all hosts of the demo, and their processes.
type network struct {
	*lab.Topology
	self    string // path of this binary
	router  *lab.Process
	agents  []*lab.Agent
	web     []*traffic.HTTPServer
	echo    []*traffic.TCPEcho
	clients []traffic.Client
}

// build creates the hosts and links; no process runs yet.
func build(self string) (*network, error) {
	t, err := lab.NewTopology(lab.Shape{Clients: 2, Balancers: 2, Servers: 3, Wired: true})
	if err != nil {
		return nil, err
	}
	n := &network{Topology: t, self: self}
	for _, c := range t.Clients {
		n.clients = append(n.clients, traffic.From(c.Host))
	}
	return n, nil
}

// close ends all processes and removes the network. It kills the agents, since no router needs a withdrawal now.
func (n *network) close() error {
	for _, a := range n.agents {
		a.Kill()
	}
	return n.Topology.Close()
}

// startServers starts a web server and an echo server on each server host.
func (n *network) startServers() error {
	for _, s := range n.Servers {
		w, err := traffic.ServeHTTP(s.Host, s.Name(), s.At(serverPort)...)
		if err != nil {
			return err
		}
		e, err := traffic.ServeTCPEcho(s.Host, s.Name(), s.At(echoPort)...)
		if err != nil {
			return err
		}
		n.web, n.echo = append(n.web, w), append(n.echo, e)
	}
	return nil
}

// routerConfig returns the configuration of the router.
func (n *network) routerConfig() routerConfig {
	c := routerConfig{ID: n.Balancers[0].Gateway4, ASN: routerASN}
	for _, b := range n.Balancers {
		for _, a := range b.At(0) {
			c.Neighbors = append(c.Neighbors, neighbor{Address: a.Addr(), ASN: balancerASN, Interface: b.Port})
		}
	}
	return c
}

// startRouter starts this binary's BGP router on the router host.
func (n *network) startRouter(c routerConfig) error {
	text, err := json.Marshal(c)
	if err != nil {
		return err
	}
	if err := n.Router.WriteFile(routerConfigPath, string(text), 0o600); err != nil {
		return err
	}
	n.router, err = n.Router.Start(lab.Command{Path: n.self, Args: []string{"demo-router"}})
	return err
}

// startAgents starts `steelyard run` on the balancer hosts.
func (n *network) startAgents() error {
	for _, b := range n.Balancers {
		a, err := lab.StartAgent(b.Host, lab.AgentOptions{Binary: n.self, Config: n.config(b).TOML()})
		if err != nil {
			return err
		}
		n.agents = append(n.agents, a)
	}
	return nil
}

// config returns the configuration of a balancer, with the defaults for all other settings.
func (n *network) config(b lab.Node) lab.AgentConfig {
	c := lab.BGPAgent(b, balancerASN, routerASN, lab.AgentService{
		Name: "web", Addresses: vips, Ports: []string{fmt.Sprintf("%d:%d", webPort, serverPort), fmt.Sprint(echoPort)},
		Backends: lab.Backends(n.Servers...),
		Check: lab.AgentCheck{
			Type: "http", Path: "/healthz", Interval: checkInterval, Timeout: checkTimeout, Rise: 1, Fall: checkFall,
		},
	})
	c.LogLevel = "info"
	return c
}

// hops returns the next hops of a VIP that these balancers announce.
func hops(vip netip.Addr, balancers ...lab.Node) []netip.Addr {
	var all []netip.Addr
	for _, b := range balancers {
		if vip.Is4() {
			all = append(all, b.V4)
		} else {
			all = append(all, b.V6)
		}
	}
	return all
}

// forwarded returns the number of requests that the servers received from each balancer's address.
func (n *network) forwarded() map[string]int {
	counts := map[string]int{}
	for _, b := range n.Balancers {
		counts[b.Name()] = 0
		for _, w := range n.web {
			clients := w.Clients()
			counts[b.Name()] += clients[b.V4] + clients[b.V6]
		}
	}
	return counts
}

// request makes this many requests to the service over IPv4 from one client, and over IPv6 from the other.
func (n *network) request(ctx context.Context, requests int) traffic.Result {
	results := make(chan traffic.Result, len(vips))
	for i, vip := range vips {
		go func() { results <- n.clients[i].Load(ctx, traffic.Load{URL: url(vip), Requests: requests}) }()
	}
	sum := traffic.Result{Servers: map[string]int{}}
	for range vips {
		r := <-results
		sum.Errors = append(sum.Errors, r.Errors...)
		for s, c := range r.Servers {
			sum.Servers[s] += c
		}
	}
	return sum
}

func url(vip netip.Addr) string { return "http://" + netip.AddrPortFrom(vip, webPort).String() + "/" }
