package demo

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"slices"
	"strings"
	"time"
)

// incident is a fault in the network of the demo.
type incident struct {
	name    string
	symptom string // as a client describes it
	cause   string
	begin   func(*show, context.Context) error
}

var incidents = []incident{
	{
		"server-killed", "no client complains now, but there were a few errors", "the programs on s2 were killed",
		func(s *show, _ context.Context) error { return errors.Join(s.web[1].Stop(), s.echo[1].Stop()) },
	},
	{
		"server-off", "no client complains now, but a few requests timed out", "the link to s3 is down",
		func(s *show, _ context.Context) error { return s.Switch.SetDown(s.Servers[2].Port) },
	},
	{
		"server-slow", "every third request takes a tenth of a second", "s1 waits 100 ms before each answer",
		func(s *show, _ context.Context) error { s.web[0].SetDelay(100 * time.Millisecond); return nil },
	},
	{
		"port-dead", fmt.Sprintf("clients of port %d are refused; port %d works", echoPort, webPort),
		fmt.Sprintf("no server listens on port %d", echoPort),
		func(s *show, _ context.Context) error {
			return errors.Join(s.echo[0].Stop(), s.echo[1].Stop(), s.echo[2].Stop())
		},
	},
	{
		"mtu", "every third upload hangs if it is larger than a packet; small requests work",
		"packets to the web server of s3 that are larger than 1400 bytes are lost, without an ICMP error",
		// A switch with a smaller MTU would still forward TCP segments for offload. The check of echoPort, which is not
		// HTTP, would find the loss because it sends a large TLS message.
		func(s *show, ctx context.Context) error {
			web := fmt.Sprintf("meta length > 1400 tcp dport %d", serverPort)
			const ping = "meta length > 1400 meta l4proto { icmp, ipv6-icmp }"
			return errors.Join(s.Servers[2].Drop(ctx, "input", web), s.Servers[2].Drop(ctx, "input", ping))
		},
	},
	{
		"route-filter", fmt.Sprintf("%s does not answer; %s works", vip4, vip6),
		fmt.Sprintf("the router does not import the route to %s", vip4),
		func(s *show, ctx context.Context) error {
			return s.changeRouter(ctx, func(c *routerConfig) { c.Reject = []netip.Prefix{host(vip4)} })
		},
	},
	{
		"wrong-as", "nobody gets an answer, on any port", "the router expects the balancers in AS 64999",
		func(s *show, ctx context.Context) error {
			return s.changeRouter(ctx, func(c *routerConfig) {
				for i := range c.Neighbors {
					c.Neighbors[i].ASN = 64999
				}
			})
		},
	},
	{
		"router-firewall", fmt.Sprintf("requests to %s time out, but it answers ping; %s works", vip4, vip6),
		fmt.Sprintf("the router drops TCP packets from %s", vip4),
		func(s *show, ctx context.Context) error {
			if err := s.compared(ctx); err != nil {
				return err
			}
			return s.Router.Drop(ctx, "forward", fmt.Sprintf("ip saddr %s tcp sport %d", vip4, webPort))
		},
	},
	{
		"checks-dropped", "nobody gets an answer, on any port", "nftables on lb1 and lb2 drops the checks' packets",
		func(s *show, ctx context.Context) (err error) {
			for _, b := range s.Balancers {
				match := fmt.Sprintf("tcp dport { %d, %d }", serverPort, echoPort)
				err = errors.Join(err, b.Drop(ctx, "output", match))
			}
			return err
		},
	},
	{
		"config-truncated", "no client complains, but a change of the configuration has no effect",
		"the configuration file of lb1 ends in the middle",
		func(s *show, _ context.Context) error {
			text := s.config(s.Balancers[0]).TOML()
			text = text[:strings.LastIndex(text, "timeout")]
			return errors.Join(s.agents[0].Configure(text), s.agents[0].Reload())
		},
	},
	{
		"agents-killed", "no client complains yet; nobody will get an answer half a minute later",
		"the agents of lb1 and lb2 were killed",
		func(s *show, _ context.Context) error { s.agents[0].Kill(); s.agents[1].Kill(); return nil },
	},
}

// Incidents returns the names of incidents for Shell, and what a client says about each.
func Incidents() (all [][2]string) {
	for _, i := range incidents {
		all = append(all, [2]string{i.name, i.symptom})
	}
	return append(all, [2]string{"random", "one of these, named when the shell ends"})
}

// find returns the incident with a name, or nil.
func find(name string) *incident {
	if name == "random" {
		return &incidents[rand.IntN(len(incidents))]
	}
	i := slices.IndexFunc(incidents, func(i incident) bool { return i.name == name })
	if i < 0 {
		return nil
	}
	return &incidents[i]
}

// compared waits until the balancers know how many connections clients usually continue. They count for half a minute.
func (s *show) compared(ctx context.Context) error {
	start := time.Now()
	_, err := s.until(ctx, "the usual share of continued connections is known", func() error {
		if time.Since(start) < 40*time.Second {
			return errors.New("the balancers count them for half a minute")
		}
		return nil
	})
	return err
}

// changeRouter restarts the router with another configuration, and waits for sessions if it accepts any.
func (s *show) changeRouter(ctx context.Context, change func(*routerConfig)) error {
	c := s.routerConfig()
	change(&c)
	if err := errors.Join(s.router.Stop(), s.startRouter(c)); err != nil {
		return err
	}
	for _, vip := range vips { // of the process that has ended
		if err := s.Router.DeleteRoute(host(vip)); err != nil {
			return err
		}
	}
	if c.Neighbors[0].ASN != balancerASN {
		return nil
	}
	return s.connected(ctx)
}
