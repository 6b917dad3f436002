package agent

import (
	"errors"
	"fmt"
	"net/netip"
	"os"
	"slices"

	"github.com/vishvananda/netlink"

	"github.com/steelyard-lb/steelyard/config"
	"github.com/steelyard-lb/steelyard/lb/agent/machine"
	"github.com/steelyard-lb/steelyard/lb/agent/preflight"
)

// Check is "steelyard check": it reads and validates a configuration file. It rejects whatever the agent would refuse,
// leave out or wait for at startup. With elsewhere the file is for another machine.
func Check(configFile string, elsewhere bool) (*config.Config, error) {
	if elsewhere {
		return preflight.LoadElsewhere(configFile)
	}
	network, err := machine.Read()
	if err != nil {
		return nil, err
	}
	found := (*config.Report).Errorf
	return preflight.Load(configFile, append(rules(network, found, found, found), startable(found))...)
}

// rules are the rules about a machine. links calls missing and wrong, and the others call found.
func rules(network *machine.Network, missing, wrong, found fail) []config.Rule {
	return []config.Rule{
		links(network, missing, wrong), preflight.Taken(network, found), preflight.NoPeers(network, found),
		preflight.Warnings(network), preflight.Programs(found), memberFamily(thisHost{}, found),
	}
}

// load is Check at startup of the agent. An address that now belongs to the machine is only a warning, because it must
// not prevent an agent that serves other addresses from starting.
func load(configFile string) (*config.Config, error) {
	network, err := machine.Read()
	if err != nil {
		return nil, err
	}
	found := (*config.Report).Warnf
	return preflight.Load(configFile,
		append(rules(network, found, (*config.Report).Errorf, found), startable(found))...)
}

// reload checks the text of a file like Check, but for a running agent. Settings that are read only at startup are
// already active, so a problem with the interfaces is only a warning. before is an earlier version of the file or nil.
func reload(before *config.Config, name string, text []byte) (*config.Config, error) {
	network, err := machine.Read()
	if err != nil {
		return nil, err
	}
	return preflight.ParseAfter(before, name, text,
		rules(network, (*config.Report).Warnf, (*config.Report).Warnf, (*config.Report).Errorf)...)
}

// startable is the rule that refuses what New would refuse, and calls found for what the agent would have to wait for.
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

// links is the rule that calls missing for interfaces that do not exist, and wrong for interfaces that are not
// Ethernet. The agent starts as soon as one of the uplinks exists, and uses the others when they appear.
func links(n *machine.Network, missing, wrong fail) config.Rule {
	check := func(r *config.Report, key string, names []string) {
		for i, name := range names {
			if is := n.NotEthernet(name); is != "" {
				wrong(r, fmt.Sprintf("%s[%d]", key, i), "name an Ethernet interface",
					"packets of %s have no Ethernet header (%s)", name, is)
			}
			if !n.HasLink(name) {
				missing(r, fmt.Sprintf("%s[%d]", key, i), "name an interface of this machine",
					"there is no interface %s", name)
			}
		}
	}
	return func(c *config.Config, r *config.Report) {
		check(r, "datapath.interfaces", c.Datapath.Interfaces)
		if c.L2 != nil {
			check(r, "l2.interfaces", c.L2.Interfaces)
		}
	}
}

// memberFamily is the rule for members of [l2] that this node cannot reach because their addresses have the other
// family. It only warns if some members have this node's family, and otherwise calls found.
func memberFamily(h host, found fail) config.Rule {
	return func(c *config.Config, r *config.Report) {
		if c.L2 == nil {
			return
		}
		facts, err := describe(c, h)
		own := facts.address()
		if err != nil || !own.IsValid() {
			return // startable reports it
		}
		family := map[bool]string{true: "IPv4", false: "IPv6"}[own.Is4()]
		report := found
		if slices.ContainsFunc(c.L2.Members, func(a netip.Addr) bool { return a.Is4() == own.Is4() }) {
			report = (*config.Report).Warnf
		}
		for i, a := range c.L2.Members {
			if a.Is4() != own.Is4() {
				report(r, fmt.Sprintf("l2.members[%d]", i), "write the "+family+" address of the member",
					"%s has no effect: this node is a member through its %s address %s", a, family, own)
			}
		}
	}
}
