// Package preflight reads a configuration and rejects it when this version does not implement it. "steelyard check",
// the start of the agent and each reload use the same function, so they reject the same files. It changes nothing and
// needs no privileges.
package preflight

import (
	"errors"
	"fmt"

	"github.com/steelyard-lb/steelyard/config"
	"github.com/steelyard-lb/steelyard/lb/file"
)

// Load reads and validates a configuration file. Its error has every problem, one per line. For a file that is not
// valid it is a config.Errors.
func Load(name string) (*config.Config, error) {
	cfg, err := config.Load(name)
	if err != nil {
		return nil, err
	}
	if err := file.New().Use(cfg); err != nil {
		return nil, fmt.Errorf("%s: %w", name, err)
	}
	if err := Supported(cfg); err != nil {
		return nil, err
	}
	return cfg, nil
}

// Supported returns an error for each setting of a valid configuration that this version does not implement.
func Supported(cfg *config.Config) error {
	var errs []error
	missing := func(format string, args ...any) {
		errs = append(errs, fmt.Errorf("not in this version: "+format, args...))
	}
	if cfg.L2 != nil && len(cfg.L2.Members) > 0 {
		missing("l2.members: every node with [l2] replies for all of its addresses, so only one node may have them")
	}
	if cfg.BGP != nil {
		for _, p := range cfg.BGP.Peers {
			if p.BFD {
				missing("bgp.peers: bfd (peer %s)", p.Address)
			}
		}
	}
	return errors.Join(errs...)
}
