package cli

import (
	"context"
	"fmt"
	"net/url"
	"strings"
	"time"

	ucli "github.com/urfave/cli/v2"

	"github.com/steelyard-lb/steelyard/lb"
	"github.com/steelyard-lb/steelyard/lb/admin"
	"github.com/steelyard-lb/steelyard/lb/printable"
)

// drain returns the commands drain and undrain.
func (e *env) drain(name, usage string) *ucli.Command {
	description := "With ADDRESS, the server of the [[service]] at this address gets no new connections, until " +
		"undrain, a reboot, or a reload with a changed entry of the server. Other balancers are not drained."
	if name == "undrain" {
		description = "Without ADDRESS, it also ends the drains of the service's servers."
	}
	cmd := &ucli.Command{
		Name: name, Usage: usage, ArgsUsage: "[SERVICE] [ADDRESS]", Description: description,
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
			if c.Bool("wait") && c.NArg() < 2 {
				return fmt.Errorf("%w: --wait needs SERVICE and ADDRESS", errUsage)
			}
			var now lb.Drains
			agent := admin.NewClient(c.String("socket"))
			if err := agent.Post(c.Context, "/v1/"+name+"?"+query.Encode(), &now); err != nil {
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
			if c.Bool("wait") {
				return waitUnused(c.Context, agent, query)
			}
			return nil
		},
	}
	if name == "drain" {
		cmd.Flags = append(cmd.Flags, &ucli.BoolFlag{
			Name: "wait", Usage: "wait until the service has no connection to ADDRESS",
		})
	}
	return cmd
}

// waitUnused returns once no flow of query's service to its backend is left.
func waitUnused(ctx context.Context, agent *admin.Client, query url.Values) error {
	query.Set("limit", "1")
	for { // a second after the drain, it is in force
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-time.After(time.Second):
		}
		var left admin.Flows
		if err := agent.Get(ctx, "/v1/flows?"+query.Encode(), &left); err != nil || len(left.Flows) == 0 && !left.More {
			return err
		}
	}
}
