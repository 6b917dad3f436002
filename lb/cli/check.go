package cli

import (
	"encoding/json"
	"errors"
	"fmt"

	ucli "github.com/urfave/cli/v2"

	"github.com/steelyard-lb/steelyard/config"
)

// checked is the output of check -o json. The field names are a contract with users (docs/operation.md).
type checked struct {
	OK       bool      `json:"ok"`
	Config   string    `json:"config"`
	Errors   []problem `json:"errors"`
	Warnings []string  `json:"warnings"`
}

// problem is one error of a configuration.
type problem struct {
	Line    int    `json:"line,omitempty"`
	Key     string `json:"key,omitempty"`
	Object  string `json:"object,omitempty"`
	Problem string `json:"problem"`
	Hint    string `json:"hint,omitempty"`
}

// check validates a configuration as the agent does at startup, as far as that needs no privileges.
func (e *env) check(c *ucli.Context) error {
	asJSON, err := wantJSON(c, "text")
	if err != nil {
		return err
	}
	name := c.String("config")
	if c.NArg() == 1 {
		name = c.Args().First()
	}
	cfg, err := e.programs.Check(name, c.Bool("elsewhere"))
	var all config.Errors
	if err != nil && !errors.As(err, &all) {
		return err
	}
	if asJSON {
		return e.checkedJSON(name, cfg, all)
	}
	if err != nil {
		fmt.Fprintln(e.err, printableLines(err.Error()))
		fmt.Fprintln(e.err, counted(len(all), "error"))
		return errReported
	}
	for _, w := range cfg.Warnings {
		fmt.Fprintln(e.err, "warning:", printableLines(w))
	}
	_, err = fmt.Fprintf(e.out, "ok: %s: %s, %s, %s%s\n", name, counted(len(cfg.Services), "service"),
		counted(len(cfg.Pools), "pool"), counted(bgpPeers(cfg), "BGP peer"), tunnelKeys(cfg))
	return err
}

// tunnelKeys describes the content of the tunnel key file, or returns "" if there is none.
func tunnelKeys(cfg *config.Config) string {
	n, seed := len(cfg.Datapath.TunnelKeys), "no hash seed"
	if n == 0 {
		return ""
	}
	if cfg.Datapath.HashSeed.IsSet() {
		seed = "a hash seed"
	}
	return ", " + counted(n, "tunnel key") + ", " + seed
}

// checkedJSON writes the result of a check to stdout, even if there are errors.
func (e *env) checkedJSON(name string, cfg *config.Config, errs config.Errors) error {
	result := checked{OK: len(errs) == 0, Config: name, Errors: []problem{}, Warnings: []string{}}
	for _, x := range errs {
		result.Errors = append(result.Errors, problem{x.Line, x.Key, x.Object, x.Problem, x.Hint})
	}
	if cfg != nil && cfg.Warnings != nil {
		result.Warnings = cfg.Warnings
	}
	to := json.NewEncoder(e.out)
	to.SetIndent("", "  ")
	if err := to.Encode(result); err != nil {
		return err
	}
	if !result.OK {
		return errReported
	}
	return nil
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
