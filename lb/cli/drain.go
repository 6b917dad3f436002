package cli

import (
	"fmt"
	"net/url"

	ucli "github.com/urfave/cli/v2"

	"github.com/steelyard-lb/steelyard/lb"
	"github.com/steelyard-lb/steelyard/lb/admin"
)

// drain returns the commands drain and undrain.
func (e *env) drain(name, usage string) *ucli.Command {
	return &ucli.Command{
		Name: name, Usage: usage, ArgsUsage: "[SERVICE]",
		Flags: []ucli.Flag{
			&ucli.BoolFlag{Name: "node", Usage: "drain or undrain this node instead of a service"}, socketFlag(),
		},
		Action: func(c *ucli.Context) error {
			if c.Bool("node") == (c.NArg() == 1) {
				return fmt.Errorf("%w: want either SERVICE or --node", errUsage)
			}
			query := url.Values{"service": {c.Args().First()}}
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
			case len(now.Services) > 0:
				fmt.Fprintf(e.out, "drained: %v\n", now.Services)
			default:
				fmt.Fprintln(e.out, "drained: nothing")
			}
			return nil
		},
	}
}
