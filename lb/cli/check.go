package cli

import (
	"errors"
	"fmt"

	ucli "github.com/urfave/cli/v2"

	"github.com/steelyard-lb/steelyard/config"
	"github.com/steelyard-lb/steelyard/lb/agent/preflight"
)

// check validates a configuration as the agent does at its start, as far as that needs no privileges.
func (e *env) check(c *ucli.Context) error {
	name := c.String("config")
	cfg, err := preflight.Load(name)
	if err != nil {
		fmt.Fprintln(e.err, err)
		var all config.Errors
		if errors.As(err, &all) {
			fmt.Fprintln(e.err, counted(len(all), "error"))
		}
		return errReported
	}
	for _, w := range cfg.Warnings {
		fmt.Fprintln(e.err, "warning:", w)
	}
	_, err = fmt.Fprintf(e.out, "ok: %s: %s, %s, %s\n", name,
		counted(len(cfg.Services), "service"), counted(len(cfg.Pools), "pool"), counted(bgpPeers(cfg), "BGP peer"))
	return err
}

func bgpPeers(cfg *config.Config) int {
	if cfg.BGP == nil {
		return 0
	}
	return len(cfg.BGP.Peers)
}

func counted(n int, what string) string {
	if n == 1 {
		return "1 " + what
	}
	return fmt.Sprintf("%d %ss", n, what)
}
