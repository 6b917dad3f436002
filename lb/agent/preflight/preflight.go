// Package preflight reads a configuration and validates it beyond its schema, against the machine. "steelyard check",
// startup of the agent and each reload use the same rules, so that check refuses what they refuse. It changes nothing
// and needs no privileges.
package preflight

import (
	"fmt"
	"net/netip"
	"slices"

	"github.com/steelyard-lb/steelyard/config"
	"github.com/steelyard-lb/steelyard/lb"
	"github.com/steelyard-lb/steelyard/lb/file"
)

// Load reads a configuration file and validates it with this version's rules and the given ones. Its error is a
// config.Errors with every problem.
func Load(name string, rules ...config.Rule) (*config.Config, error) {
	text, err := config.Read(name)
	if err != nil {
		return nil, err
	}
	return ParseAfter(nil, name, text, rules...)
}

// ParseAfter is like Load, for the text of a file. Names of secret files in it are relative to the directory of name.
// before is an earlier version or nil (config.ParseAfter).
func ParseAfter(before *config.Config, name string, text []byte, rules ...config.Rule) (*config.Config, error) {
	return config.ParseAfter(before, name, text, append([]config.Rule{Addresses}, rules...)...)
}

// LoadElsewhere is like Load, for another machine's configuration.
func LoadElsewhere(name string) (*config.Config, error) {
	text, err := config.Read(name)
	if err != nil {
		return nil, err
	}
	return config.ParseElsewhere(name, text, Addresses)
}

// Addresses is the rule that refuses services for which the pools have no address left.
func Addresses(c *config.Config, r *config.Report) {
	if !r.Valid() {
		return // pools may be missing
	}
	for _, e := range file.Unassignable(c) {
		n := slices.IndexFunc(c.Services, func(s config.Service) bool { return s.Name == e.Service })
		r.Errorf(config.KeyOf("service", n, "pool"), "make the pool larger, or write address", "%v", e.Err)
	}
}

// Network is implemented by *machine.Network.
type Network interface {
	Taken(a netip.Addr) string
	OnLink(a netip.Addr) string
	TakenIn(r lb.AddrRange) (lowest netip.Addr, what string)
	NoHost(a netip.Addr) string
	Own(a netip.Addr) bool
}

// NoPeers returns the rule that calls fail for BGP peers whose addresses no other host can have. A peer whose port is
// not listen_port is permitted, because it is a routing daemon on this machine.
func NoPeers(
	n Network, fail func(r *config.Report, key, hint, problem string, args ...any),
) config.Rule {
	return func(c *config.Config, r *config.Report) {
		if c.BGP == nil {
			return
		}
		for i, p := range c.BGP.Peers {
			if what := n.NoHost(p.Address.WithZone("")); what != "" && int(p.Port) == c.BGP.ListenPort {
				key := config.KeyOf("bgp.peers", i, "address")
				const hint = "write the router's address; for another daemon on this machine, change listen_port"
				fail(r, key, hint, "%s is %s", p.Address, what)
			}
		}
	}
}

// Taken returns the rule that calls fail (Report.Errorf or Report.Warnf) for addresses of services and pools that
// belong to the machine or to its network.
func Taken(
	n Network, fail func(r *config.Report, key, hint, problem string, args ...any),
) config.Rule {
	return func(c *config.Config, r *config.Report) {
		for i, s := range c.Services {
			for k, a := range s.Addresses {
				if what := n.Taken(a); what != "" {
					key := fmt.Sprintf("%s[%d]", config.KeyOf("service", i, "address"), k)
					fail(r, key, "use another address for the service", "%s is %s", a, what)
				}
			}
		}
		for i, p := range c.Pools {
			for k, x := range p.Ranges {
				if a, what := n.TakenIn(x); what != "" {
					key := fmt.Sprintf("%s[%d]", config.KeyOf("pool", i, "addresses"), k)
					fail(r, key, "leave it out; ranges can be written like \"203.0.113.40-203.0.113.50\"",
						"has %s, which is %s", a, what)
				}
			}
		}
	}
}
