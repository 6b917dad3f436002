package agent

import (
	"errors"
	"fmt"
	"os"

	"github.com/vishvananda/netlink"

	"github.com/steelyard-lb/steelyard/config"
	"github.com/steelyard-lb/steelyard/lb/agent/machine"
	"github.com/steelyard-lb/steelyard/lb/agent/preflight"
)

// Check is "steelyard check": it reads and validates a configuration file. It refuses what the agent refuses at its
// start, and what the agent would have to leave out. elsewhere: the file is for another machine.
func Check(configFile string, elsewhere bool) (*config.Config, error) {
	if elsewhere {
		return preflight.Load(configFile)
	}
	network, err := machine.Read()
	if err != nil {
		return nil, err
	}
	return preflight.Load(configFile, startable((*config.Report).Errorf), links(network, (*config.Report).Errorf),
		preflight.Taken(network, (*config.Report).Errorf), preflight.NoPeers(network, (*config.Report).Errorf),
		onLink(network))
}

// load is Check for the start of the agent: an address that now belongs to the machine must not keep an agent from
// starting that serves other addresses, so it is a warning.
func load(configFile string) (*config.Config, error) {
	network, err := machine.Read()
	if err != nil {
		return nil, err
	}
	return preflight.Load(configFile, startable((*config.Report).Warnf), links(network, (*config.Report).Warnf),
		preflight.Taken(network, (*config.Report).Warnf), preflight.NoPeers(network, (*config.Report).Warnf),
		onLink(network))
}

// reload is Check for a running agent. What is read at the start only is not validated against the machine.
func reload(configFile string) (*config.Config, error) {
	network, err := machine.Read()
	if err != nil {
		return nil, err
	}
	return preflight.Load(configFile, preflight.Taken(network, (*config.Report).Errorf),
		preflight.NoPeers(network, (*config.Report).Errorf), onLink(network))
}

// startable is the rule that refuses what New would refuse, and finds what the agent would have to wait for.
func startable(found fail) config.Rule {
	return func(c *config.Config, r *config.Report) {
		_, err := describe(c, thisHost{})
		var lack *lackError
		switch {
		case errors.As(err, new(netlink.LinkNotFoundError)): // links reports it
		case mayCome(err) && errors.As(err, &lack):
			found(r, lack.key, lack.hint, "%v", lack.err)
		case errors.As(err, &lack):
			r.Errorf(lack.key, lack.hint, "%v", lack.err)
		}
		if c.Kubernetes == nil {
			return
		}
		if _, err := restConfig(c.Kubernetes.Kubeconfig); err != nil && c.Kubernetes.Kubeconfig != "" {
			r.Errorf("kubernetes.kubeconfig", "name the file with the credentials for the API server", "%v", plain(err))
		} else if err != nil {
			r.Errorf("kubernetes.kubeconfig", "outside of a pod, name a file", "missing: %v", err)
		}
	}
}

// plain removes the path from an error about a file.
func plain(err error) error {
	var pe *os.PathError
	if errors.As(err, &pe) {
		return fmt.Errorf("%s: %w", pe.Path, pe.Err)
	}
	return err
}

type fail = func(r *config.Report, key, hint, problem string, args ...any)

// links is the rule that finds interfaces that do not exist, and those that are of another kind. The agent starts as
// soon as one of the uplinks exists, and uses the others from when they exist.
func links(n *machine.Network, found fail) config.Rule {
	missing := func(r *config.Report, key string, names []string) {
		for i, name := range names {
			if is := n.NotEthernet(name); is != "" {
				r.Errorf(fmt.Sprintf("%s[%d]", key, i), "name an Ethernet interface",
					"packets of %s have no Ethernet header (%s)", name, is)
			}
			if !n.HasLink(name) {
				found(r, fmt.Sprintf("%s[%d]", key, i), "name an interface of this machine",
					"there is no interface %s", name)
			}
		}
	}
	return func(c *config.Config, r *config.Report) {
		missing(r, "datapath.interfaces", c.Datapath.Interfaces)
		if c.L2 != nil {
			missing(r, "l2.interfaces", c.L2.Interfaces)
		}
	}
}

// onLink is the rule that warns of addresses that neighbours resolve by ARP or NDP although nothing answers for them.
func onLink(n *machine.Network) config.Rule {
	return func(c *config.Config, r *config.Report) {
		if c.L2 != nil {
			return
		}
		warn := func(key string, a fmt.Stringer, link string) {
			r.Warnf(key, "add [l2], or use an address of another prefix",
				"hosts on %s resolve %s by ARP or NDP, and nothing answers", link, a)
		}
		for i, s := range c.Services {
			for k, a := range s.Addresses {
				if link := n.OnLink(a); link != "" && n.Taken(a) == "" {
					warn(fmt.Sprintf("%s[%d]", config.KeyOf("service", i, "address"), k), a, link)
				}
			}
		}
		for i, p := range c.Pools {
			for k, x := range p.Ranges {
				if link := n.OnLink(x.From); link != "" && n.Taken(x.From) == "" {
					warn(fmt.Sprintf("%s[%d]", config.KeyOf("pool", i, "addresses"), k), x.From, link)
				}
			}
		}
	}
}
