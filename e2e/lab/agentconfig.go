package lab

import (
	"fmt"
	"net/netip"
	"strings"
	"time"
)

// AgentConfig is an agent's configuration. Zero values are omitted, so that the agent's defaults apply. Keys without a
// field go into Extra.
type AgentConfig struct {
	Name       string
	Address    netip.Addr // the node's address and router ID
	Interfaces []string
	Mode       string // auto, xdp, xdp-generic, tc
	MaxFlows   int
	// TunnelSources are the addresses from which the agent accepts and decapsulates tunnel packets.
	TunnelSources []netip.Addr
	TunnelKeyFile string
	ASN           uint32 // 0 for no BGP
	ListenPort    int
	Peers         []AgentPeer
	BGP           []string // additional keys of [bgp]
	L2            []string // interfaces; empty for no L2
	L2Members     []netip.Addr
	L2SecretFile  string
	Services      []AgentService
	LogLevel      string
	// Env is added to the agent's environment.
	Env []string
	// Extra has whole TOML tables to append.
	Extra string
}

// AgentPeer is a [[bgp.peers]] table.
type AgentPeer struct {
	Address      netip.Addr
	ASN          uint32
	HoldTime     time.Duration
	PasswordFile string
	Extra        string // additional keys of the table, one per line
}

// AgentService is a [[service]] table.
type AgentService struct {
	Name       string
	Addresses  []netip.Addr
	Ports      []string // "80:8080", "53/udp"
	Backends   []AgentBackend
	Algorithm  string
	Forward    string
	MinHealthy int
	Check      AgentCheck
	Extra      string // additional keys of the table, one per line
}

type AgentBackend struct {
	Address netip.Addr
	Port    int
	Weight  int
	Drain   bool
}

type AgentCheck struct {
	Type              string
	Path              string
	Port              int
	Interval, Timeout time.Duration
	Rise, Fall        int
}

// Backends returns the servers' addresses, in both families, as backends.
func Backends(servers ...Node) []AgentBackend {
	var all []AgentBackend
	for _, s := range servers {
		all = append(all, AgentBackend{Address: s.V4}, AgentBackend{Address: s.V6})
	}
	return all
}

// BGPAgent returns the configuration of an agent on node that announces to the node's gateways over BGP, over both
// families, and forwards on eth0.
func BGPAgent(node Node, asn, routerASN uint32, services ...AgentService) AgentConfig {
	c := AgentConfig{
		Name: node.Name(), Address: node.V4, Interfaces: []string{"eth0"}, ASN: asn,
		Services: services, LogLevel: "debug",
	}
	for _, g := range node.Gateways() {
		c.Peers = append(c.Peers, AgentPeer{Address: g, ASN: routerASN, HoldTime: 3 * time.Second})
	}
	return c
}

// TOML returns the text of the configuration file.
func (c AgentConfig) TOML() string {
	t := &tomlText{}
	t.table("[node]")
	t.str("name", c.Name)
	t.addr("router_id", c.Address)
	t.addr("address", c.Address)
	t.table("[datapath]")
	t.strs("interfaces", c.Interfaces)
	t.str("mode", c.Mode)
	t.num("max_flows", c.MaxFlows)
	t.addrs("tunnel_sources", c.TunnelSources)
	t.str("tunnel_key_file", c.TunnelKeyFile)
	if c.ASN != 0 {
		t.table("[bgp]")
		t.num("asn", int(c.ASN))
		t.num("listen_port", c.ListenPort)
		for _, line := range c.BGP {
			t.raw(line)
		}
		for _, p := range c.Peers {
			t.table("[[bgp.peers]]")
			t.addr("address", p.Address)
			t.num("asn", int(p.ASN))
			t.dur("hold_time", p.HoldTime)
			t.str("password_file", p.PasswordFile)
			t.raw(p.Extra)
		}
	}
	if len(c.L2) > 0 {
		t.table("[l2]")
		t.strs("interfaces", c.L2)
		t.addrs("members", c.L2Members)
		t.str("secret_file", c.L2SecretFile)
	}
	for _, s := range c.Services {
		s.write(t)
	}
	if c.LogLevel != "" {
		t.table("[log]")
		t.str("level", c.LogLevel)
	}
	t.raw(c.Extra)
	return t.b.String()
}

// AgentServices returns the text of more services for a configuration file.
func AgentServices(services ...AgentService) string {
	t := &tomlText{}
	for _, s := range services {
		s.write(t)
	}
	return t.b.String()
}

func (s AgentService) write(t *tomlText) {
	t.table("[[service]]")
	t.str("name", s.Name)
	t.addrs("address", s.Addresses)
	t.strs("ports", s.Ports)
	t.str("algorithm", s.Algorithm)
	t.str("forward", s.Forward)
	t.num("min_healthy", s.MinHealthy)
	t.raw(s.Extra)
	if c := s.Check; c.Type != "" {
		t.table("[service.check]")
		t.str("type", c.Type)
		t.str("path", c.Path)
		t.num("port", c.Port)
		t.dur("interval", c.Interval)
		t.dur("timeout", c.Timeout)
		t.num("rise", c.Rise)
		t.num("fall", c.Fall)
	}
	for _, b := range s.Backends {
		t.table("[[service.backends]]")
		t.addr("address", b.Address)
		t.num("port", b.Port)
		t.num("weight", b.Weight)
		if b.Drain {
			t.raw("drain = true")
		}
	}
}

// tomlText writes the keys that have a value. %q writes a basic TOML string as long as the text is ASCII.
type tomlText struct{ b strings.Builder }

func (t *tomlText) table(head string) { fmt.Fprintf(&t.b, "\n%s\n", head) }

func (t *tomlText) raw(text string) {
	if text != "" {
		fmt.Fprintln(&t.b, strings.TrimSuffix(text, "\n"))
	}
}

func (t *tomlText) str(key, v string) {
	if v != "" {
		fmt.Fprintf(&t.b, "%s = %q\n", key, v)
	}
}

func (t *tomlText) num(key string, v int) {
	if v != 0 {
		fmt.Fprintf(&t.b, "%s = %d\n", key, v)
	}
}

func (t *tomlText) dur(key string, v time.Duration) {
	if v != 0 {
		t.str(key, v.String())
	}
}

func (t *tomlText) addr(key string, v netip.Addr) {
	if v.IsValid() {
		t.str(key, v.String())
	}
}

func (t *tomlText) addrs(key string, v []netip.Addr) {
	var texts []string
	for _, a := range v {
		texts = append(texts, a.String())
	}
	t.strs(key, texts)
}

func (t *tomlText) strs(key string, v []string) {
	if len(v) > 0 {
		fmt.Fprintf(&t.b, "%s = [\"%s\"]\n", key, strings.Join(v, `", "`))
	}
}
