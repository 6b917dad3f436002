package cli

import (
	"fmt"
	"net/url"
	"strings"

	ucli "github.com/urfave/cli/v2"

	"github.com/steelyard-lb/steelyard/lb"
	"github.com/steelyard-lb/steelyard/lb/admin"
	"github.com/steelyard-lb/steelyard/lb/printable"
)

// drain returns the commands drain and undrain.
func (e *env) drain(name, usage string) *ucli.Command {
	return &ucli.Command{
		Name: name, Usage: usage, ArgsUsage: "[SERVICE] [ADDRESS]",
		Description: "With ADDRESS, the server of the [[service]] at this address gets no new connections, until " +
			"undrain, a reboot, or a reload with a changed entry of the server.",
		Flags: []ucli.Flag{
			&ucli.BoolFlag{Name: "node", Usage: "drain or undrain this node instead of a service"}, socketFlag(),
		},
		Action: func(c *ucli.Context) error {
			if c.Bool("node") == (c.NArg() > 0) {
				return fmt.Errorf("%w: want either SERVICE, with or without ADDRESS, or --node", errUsage)
			}
			query := url.Values{"service": {c.Args().First()}}
			if c.NArg() > 1 {
				query.Set("backend", c.Args().Get(1))
			}
			if c.Bool("node") {
				query = url.Values{"node": {"true"}}
			}
			var now lb.Drains
			path := "/v1/" + name + "?" + query.Encode()
			if err := admin.NewClient(c.String("socket")).Post(c.Context, path, &now); err != nil {
				return err
			}
			switch {
			case now.Node:
				fmt.Fprintln(e.out, "drained: the node")
			case len(now.Names()) > 0:
				fmt.Fprintf(e.out, "drained: [%s]\n", printable.Text(strings.Join(now.Names(), ", ")))
			default:
				fmt.Fprintln(e.out, "drained: nothing")
			}
			return nil
		},
	}
}
