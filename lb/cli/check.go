package cli

import (
	"errors"
	"fmt"

	ucli "github.com/urfave/cli/v2"

	"github.com/steelyard-lb/steelyard/config"
	"github.com/steelyard-lb/steelyard/lb/file"
)

// check validates a configuration as far as that is possible without touching anything.
func (e *env) check(c *ucli.Context) error {
	name := c.String("config")
	cfg, err := load(name)
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

// load reads a configuration and makes sure that it can be carried out by this version.
func load(name string) (*config.Config, error) {
	cfg, err := config.Load(name)
	if err != nil {
		return nil, err
	}
	if err := file.New().Use(cfg); err != nil {
		return nil, fmt.Errorf("%s: %w", name, err)
	}
	return cfg, nil
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
