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

// weight returns the command that sets the weight of a server.
func (e *env) weight() *ucli.Command {
	return &ucli.Command{
		Name: "weight", Usage: "change a server's share of new connections", ArgsUsage: "SERVICE ADDRESS WEIGHT",
		Description: fmt.Sprintf("WEIGHT is a number from 0 to %d, or default. It replaces the configured weight "+
			"until a reboot, or a reload with a changed entry of the server.", lb.MaxWeight),
		Flags: []ucli.Flag{socketFlag()},
		Action: func(c *ucli.Context) error {
			query := url.Values{
				"service": {c.Args().Get(0)}, "backend": {c.Args().Get(1)}, "weight": {c.Args().Get(2)},
			}
			var now admin.Weights
			err := admin.NewClient(c.String("socket")).Post(c.Context, "/v1/weight?"+query.Encode(), &now)
			if err != nil {
				return err
			}
			names := "as configured"
			if len(now.Weights) > 0 {
				names = printable.Text(strings.Join(lb.Drains{Weights: now.Weights}.WeightNames(), ", "))
			}
			_, err = fmt.Fprintf(e.out, "weights: %s\n", names)
			return err
		},
	}
}
