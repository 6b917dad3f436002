package cli

import (
	"encoding/json"
	"fmt"
	"io"
	"net/url"
	"strconv"
	"text/tabwriter"
	"time"

	ucli "github.com/urfave/cli/v2"

	"github.com/steelyard-lb/steelyard/lb"
	"github.com/steelyard-lb/steelyard/lb/admin"
)

// flows returns a list command with filters.
func (e *env) flows() *ucli.Command {
	cmd := e.list("flows", "list entries of the flow table, filtered by service, client, backend …", "", nil)
	usage := map[string]string{
		"scope": "list only flows in `SCOPE`: outside (to VIPs), or, of the service proxy, inside (of this node and " +
			"its pods) or node (to node ports)",
		"service": "list only flows of the service `NAME`",
		"client":  "list only flows from `ADDRESS` or prefix",
		"backend": "list only flows to the server `ADDRESS`",
		"address": "list only flows to the VIP `ADDRESS`",
		"port":    "list only flows to `PORT` of the VIP",
		"state":   "list only flows in `STATE`: " + lb.Words(lb.FlowStates),
		"limit":   "list at most `N` flows; 0: no limit; default 1000",
	}
	for _, name := range lb.FlowFilters {
		cmd.Flags = append(cmd.Flags, &ucli.StringFlag{Name: name, Usage: usage[name]})
	}
	cmd.Subcommands = []*ucli.Command{e.flowsEnd()}
	cmd.Action = func(c *ucli.Context) error {
		query := url.Values{}
		for _, name := range lb.FlowFilters {
			if !c.IsSet(name) {
				continue
			}
			if err := new(lb.FlowFilter).Set(name, c.String(name)); err != nil {
				return fmt.Errorf("%w: --%w", errUsage, err)
			}
			query.Set(name, c.String(name))
		}
		return e.show(c, "/v1/flows?"+query.Encode(), flowsTable)
	}
	return cmd
}

func flowsTable(w io.Writer, answer []byte) error {
	var all admin.Flows
	if err := json.Unmarshal(answer, &all); err != nil {
		return fmt.Errorf("read the response: %w", err)
	}
	tw := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	fmt.Fprintln(tw, "SERVICE\tSCOPE\tCLIENT\tADDRESS\tBACKEND\tFORWARD\tSTATE\t"+
		"AGE\tIDLE\tPACKETS\tBYTES\tRESENT\tHANDSHAKE")
	for _, f := range all.Flows {
		frontend := lb.Frontend{VIP: f.Address, Port: f.Port, Protocol: f.Protocol}
		age := "-"
		if f.Age > 0 || f.FromClient.Packets > 0 {
			age = wholeSeconds(f.Age).String()
		}
		writeRow(tw, dash(f.Service), f.Scope, f.Client, frontend, f.Backend, f.Forward, f.State, age,
			wholeSeconds(f.Idle),
			each(f, func(x lb.FlowFigures) uint64 { return x.Packets }),
			each(f, func(x lb.FlowFigures) uint64 { return x.Bytes }),
			each(f, func(x lb.FlowFigures) uint64 { return uint64(x.Retransmissions) }), seconds(f.Handshake))
	}
	if all.More {
		fmt.Fprintf(tw, "… and more; see --limit\n")
	}
	return tw.Flush()
}

func wholeSeconds(s float64) time.Duration {
	return time.Duration(s * float64(time.Second)).Truncate(time.Second)
}

// each returns a figure of both directions, the client's first.
func each(f lb.FlowStatus, figure func(lb.FlowFigures) uint64) string {
	if f.FromClient == (lb.FlowFigures{}) && f.FromServer == (lb.FlowFigures{}) { // not known
		return "-"
	}
	one := func(n uint64) string {
		if n < 1000 { // exactly
			return strconv.FormatUint(n, 10)
		}
		return short(float64(n))
	}
	return one(figure(f.FromClient)) + "/" + one(figure(f.FromServer))
}

// flowsEnd returns the command that ends connections.
func (e *env) flowsEnd() *ucli.Command {
	names := []string{"client", "service", "backend"}
	return &ucli.Command{
		Name: "end", Usage: "end the connections that match all filters; at least one is required",
		Flags: []ucli.Flag{
			&ucli.StringFlag{Name: "client", Usage: "end connections from `ADDRESS` or prefix"},
			&ucli.StringFlag{Name: "service", Usage: "end connections of the service `NAME`"},
			&ucli.StringFlag{Name: "backend", Usage: "end connections to the server `ADDRESS`"},
			socketFlag(),
		},
		Action: func(c *ucli.Context) error {
			query := url.Values{}
			for _, name := range names {
				if !c.IsSet(name) {
					continue
				}
				if err := new(lb.FlowFilter).Set(name, c.String(name)); err != nil {
					return fmt.Errorf("%w: --%w", errUsage, err)
				}
				query.Set(name, c.String(name))
			}
			if len(query) == 0 {
				return fmt.Errorf("%w: want --client, --service or --backend", errUsage)
			}
			var done admin.EndedFlows
			agent := admin.NewClient(c.String("socket"))
			if err := agent.Post(c.Context, "/v1/flows/end?"+query.Encode(), &done); err != nil {
				return err
			}
			if done.Kept > 0 {
				fmt.Fprintf(e.err, "kept: %s by dsr or tunnel, whose packets would reach the same server again\n",
					counted(done.Kept, "connection"))
			}
			_, err := fmt.Fprintf(e.out, "ended: %s\n", counted(done.Ended, "connection"))
			return err
		},
	}
}
