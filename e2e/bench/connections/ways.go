package connections

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"strings"
	"time"

	"github.com/steelyard-lb/steelyard/e2e/lab"
)

// One host has the addresses of all servers.
const (
	vip, vipOne      = "203.0.113.10", "203.0.113.11" // to all servers, and to one
	firstServer      = "192.0.2.21"
	servers          = 4
	clientSide       = "198.51.100.1"
	serverSide       = "192.0.2.1"
	pathConfig       = "/run/bench.conf"
	pathServerConfig = "/run/nginx.conf"
)

type way struct {
	name    string
	needs   string // required program
	to, one string // addresses of all servers and of one; one may be empty
	xdp     bool   // the links support XDP
	prepare func(*site, Options) error
}

const plain, kubeProxy, serviceProxy = "plain routing", "kube-proxy, nftables", "Steelyard, pods"

var ways = []way{
	{name: plain, to: firstServer, prepare: func(*site, Options) error { return nil }},
	{name: "nftables DNAT", needs: "nft", to: vip, one: vipOne, prepare: prepareNFT},
	{name: kubeProxy, needs: "nft", to: vip, one: vipOne, prepare: prepareKubeProxy},
	{name: "HAProxy", needs: "haproxy", to: vip, one: vipOne, prepare: prepareHAProxy},
	{name: "nginx stream", needs: "nginx", to: vip, prepare: prepareNginx},
	{name: "Steelyard nat, tc", to: vip, one: vipOne, prepare: prepareSteelyard("tc")},
	{name: serviceProxy, to: vip, one: vipOne, prepare: prepareServiceProxy},
	{name: "Steelyard nat, XDP", to: vip, xdp: true, prepare: prepareSteelyard("xdp")},
}

// site is a client, a host that forwards, and a host with the servers.
type site struct {
	way                   way
	client, node, servers *lab.Host
	values                map[string][]float64
}

func newSite(l *lab.Lab, w way, o Options) (_ *site, err error) {
	s := &site{way: w, values: map[string][]float64{}}
	for name, h := range map[string]**lab.Host{"client": &s.client, "node": &s.node, "servers": &s.servers} {
		if *h, err = l.Host(name); err != nil {
			return nil, err
		}
	}
	links := lab.LinkOptions{SoftwareChecksums: w.xdp}
	prefix := func(a string) []netip.Prefix { return []netip.Prefix{netip.PrefixFrom(netip.MustParseAddr(a), 24)} }
	err = errors.Join(
		l.Link(lab.End{Host: s.client, Name: "eth0", Addresses: prefix("198.51.100.2")},
			lab.End{Host: s.node, Name: "clients", Addresses: prefix(clientSide)}, links),
		l.Link(lab.End{Host: s.servers, Name: "eth0"},
			lab.End{Host: s.node, Name: "servers", Addresses: prefix(serverSide)}, links))
	if err != nil {
		return nil, err
	}
	for i := range servers {
		if err := s.servers.AddAddress("eth0", netip.PrefixFrom(server(i), 24)); err != nil {
			return nil, err
		}
	}
	err = errors.Join(s.node.Forward(),
		s.client.AddRoute(lab.Default, netip.MustParseAddr(clientSide)),
		s.servers.AddRoute(lab.Default, netip.MustParseAddr(serverSide)),
		s.client.Sysctl(map[string]string{"net.ipv4.ip_local_port_range": "1024 65535"}),
		s.node.Sysctl(map[string]string{"net.ipv4.ip_local_port_range": "1024 59999"}),
		s.servers.Sysctl(map[string]string{"net.ipv4.tcp_max_tw_buckets": "0", "net.core.somaxconn": "4096"}))
	if err != nil {
		return nil, err
	}
	if err := s.serve(); err != nil {
		return nil, err
	}
	if err := w.prepare(s, o); err != nil {
		return nil, err
	}
	for _, to := range []string{w.to, w.one} {
		if to == "" {
			continue
		}
		if err := s.forwards(context.Background(), to); err != nil {
			return nil, err
		}
	}
	return s, nil
}

// forwards waits until a client can reach a server at this address.
func (s *site) forwards(ctx context.Context, to string) error {
	_, err := lab.Until(ctx, 30*time.Second, "the way forwards", func() error {
		c, err := s.client.Dial(ctx, "tcp", to+":80")
		if err != nil {
			return err
		}
		return c.Close()
	})
	return err
}

func server(i int) netip.Addr {
	a := netip.MustParseAddr(firstServer)
	for range i {
		a = a.Next()
	}
	return a
}

// serve starts the web server. It keeps connections open until clients close them.
func (s *site) serve() error {
	config := `daemon off; worker_processes 2; pid /run/nginx.pid; error_log stderr;
events { worker_connections 4096; }
http {
	access_log off; keepalive_requests 1000000000;
	server {
		listen 80 backlog=4096;
		location / { return 200 "ok\n"; }
		location /big { root /run; }
	}
}
`
	err := errors.Join(s.servers.WriteFile(pathServerConfig, config, 0o644),
		s.servers.WriteFile("/run/big", strings.Repeat("x", 4<<20), 0o644))
	if err != nil {
		return err
	}
	_, err = s.servers.Start(lab.Command{Path: "nginx", Args: []string{"-c", pathServerConfig}})
	return err
}

func prepareNFT(s *site, _ Options) error {
	var to []string
	for i := range servers {
		to = append(to, fmt.Sprintf("%d : %s", i, server(i)))
	}
	rules := fmt.Sprintf(`table ip bench {
	chain pre {
		type nat hook prerouting priority dstnat
		ip daddr %s tcp dport 80 dnat to jhash ip saddr . tcp sport mod %d map { %s }
		ip daddr %s tcp dport 80 dnat to %s
	}
	chain post {
		type nat hook postrouting priority srcnat
		masquerade
	}
}
`, vip, servers, strings.Join(to, ", "), vipOne, firstServer)
	if err := s.node.WriteFile(pathConfig, rules, 0o644); err != nil {
		return err
	}
	if _, err := s.node.Run(context.Background(), "nft", "-f", pathConfig); err != nil {
		return err
	}
	return s.node.Sysctl(map[string]string{"net.netfilter.nf_conntrack_tcp_timeout_time_wait": "1"})
}

// own adds the VIPs to the node, for programs that listen there.
func (s *site) own() error {
	return errors.Join(s.node.AddAddress("lo", netip.MustParsePrefix(vip+"/32")),
		s.node.AddAddress("lo", netip.MustParsePrefix(vipOne+"/32")),
		s.node.Sysctl(map[string]string{"net.core.somaxconn": "4096", "net.ipv4.tcp_max_tw_buckets": "0"}))
}

func prepareHAProxy(s *site, _ Options) error {
	var b strings.Builder
	b.WriteString("global\n\tmaxconn 8000\ndefaults\n\tmode tcp\n\ttimeout connect 5s\n\ttimeout client 1m\n" +
		"\ttimeout server 1m\n")
	for addr, n := range map[string]int{vip: servers, vipOne: 1} {
		fmt.Fprintf(&b, "listen %s\n\tbind %s:80 backlog 4096\n\tbalance roundrobin\n", addr, addr)
		for i := range n {
			fmt.Fprintf(&b, "\tserver s%d %s:80\n", i, server(i))
		}
	}
	if err := errors.Join(s.own(), s.node.WriteFile(pathConfig, b.String(), 0o644)); err != nil {
		return err
	}
	_, err := s.node.Start(lab.Command{Path: "haproxy", Args: []string{"-f", pathConfig}})
	return err
}

func prepareNginx(s *site, _ Options) error {
	var to strings.Builder
	for i := range servers {
		fmt.Fprintf(&to, "server %s:80; ", server(i))
	}
	config := fmt.Sprintf(`load_module /usr/lib/nginx/modules/ngx_stream_module.so;
daemon off; worker_processes 2; pid /run/nginx.pid; error_log stderr;
events { worker_connections 4096; }
stream {
	upstream all { %s }
	server { listen %s:80 backlog=4096; proxy_pass all; }
}
`, to.String(), vip)
	if err := errors.Join(s.own(), s.node.WriteFile(pathConfig, config, 0o644)); err != nil {
		return err
	}
	_, err := s.node.Start(lab.Command{Path: "nginx", Args: []string{"-c", pathConfig}})
	return err
}

func prepareSteelyard(mode string) func(*site, Options) error {
	return func(s *site, o Options) error {
		c := lab.AgentConfig{Name: "node", Address: netip.MustParseAddr(serverSide),
			Interfaces: []string{"clients", "servers"}, Mode: mode,
			MaxFlows: 1_000_000} // the servers close first, so entries stay for 65 s
		for addr, n := range map[string]int{vip: servers, vipOne: 1} {
			svc := lab.AgentService{Name: addr, Addresses: []netip.Addr{netip.MustParseAddr(addr)},
				Ports: []string{"80"}, Forward: "nat", Check: lab.AgentCheck{Type: "none"}}
			for i := range n {
				svc.Backends = append(svc.Backends, lab.AgentBackend{Address: server(i)})
			}
			c.Services = append(c.Services, svc)
		}
		_, err := lab.StartAgent(s.node, lab.AgentOptions{Binary: o.Binary, Config: c.TOML()})
		return err
	}
}
