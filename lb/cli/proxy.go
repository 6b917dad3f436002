package cli

import (
	"errors"
	"fmt"
	"slices"

	ucli "github.com/urfave/cli/v2"

	"github.com/steelyard-lb/steelyard/lb"
	"github.com/steelyard-lb/steelyard/lb/admin"
	"github.com/steelyard-lb/steelyard/lb/printable"
)

// proxy returns the commands about the service proxy of this node.
func (e *env) proxy() *ucli.Command {
	return &ucli.Command{
		Name: "proxy", Usage: "show who serves this node's Services, and take them over from kube-proxy",
		Action: func(c *ucli.Context) error {
			return fmt.Errorf("%w: want diff, status, take, give-back or watch", errUsage)
		},
		Subcommands: []*ucli.Command{
			{
				Name: "diff", Usage: "print where the agent would choose other endpoints of Services than kube-proxy",
				Flags: []ucli.Flag{outputFlag("text"), socketFlag()}, Action: e.proxyDiff,
			},
			{
				Name: "status", Usage: "show who serves this node's Services, and what to do next",
				Flags: []ucli.Flag{outputFlag("text"), socketFlag()}, Action: e.proxyStatus,
			},
			{
				Name: "watch", Usage: "serve pods that start while the agent is not running; the installation runs it",
				Action: e.proxyWatch,
			},
			{
				Name: "take", Usage: "serve this node's Services from now on; kube-proxy's connections go on",
				Flags: []ucli.Flag{socketFlag()}, Action: e.proxyChange("/v1/proxy/take", "ours", "both"),
			},
			{
				Name: "give-back", Usage: "leave new connections to kube-proxy, which runs again; open ones go on",
				Flags: []ucli.Flag{socketFlag()}, Action: e.proxyChange("/v1/proxy/give-back", "drain", "theirs"),
			},
		},
	}
}

// proxyDiff prints where the agent would choose other endpoints of Services than kube-proxy. It changes nothing.
func (e *env) proxyDiff(c *ucli.Context) error {
	asJSON, err := wantJSON(c, "text")
	if err != nil {
		return err
	}
	var changes []lb.Change
	err = admin.NewClient(c.String("socket")).Get(c.Context, "/v1/proxy/diff", &changes)
	if err != nil {
		return err
	}
	if asJSON {
		return e.asJSON(changes)
	}
	for _, change := range changes {
		fmt.Fprintln(e.out, printable.Text(change.String()))
	}
	if len(changes) == 0 {
		fmt.Fprintln(e.out, "no difference")
	}
	return nil
}

// proxyStates explains the states of a service proxy.
var proxyStates = map[string]string{
	"ours":   "this agent serves this node's Services",
	"both":   "this agent serves new connections; those of another service proxy go on",
	"drain":  "another service proxy serves new connections; those of this agent go on",
	"theirs": "this agent does not serve this node's Services",
}

// proxyStatus prints who serves this node's Services.
func (e *env) proxyStatus(c *ucli.Context) error {
	asJSON, err := wantJSON(c, "text")
	if err != nil {
		return err
	}
	var s admin.ProxyState
	if err := admin.NewClient(c.String("socket")).Get(c.Context, "/v1/proxy", &s); err != nil {
		return err
	}
	if asJSON {
		return e.asJSON(s)
	}
	e.showProxy(s)
	if s.State != "theirs" && s.State != "drain" {
		text := "served even while the agent is not running"
		if !s.Watched {
			text = "not served while the agent is not running: start steelyard-watch.service"
		}
		fmt.Fprintf(e.out, "new pods               %s\n", text)
	}
	return nil
}

func (e *env) showProxy(s admin.ProxyState) {
	other := s.Other
	if other == "" {
		other = "none"
	}
	fmt.Fprintf(e.out, "%s: %s\n", s.State, proxyStates[s.State])
	fmt.Fprintf(e.out, "rules of others        %s\n", printable.Text(other))
	fmt.Fprintf(e.out, "connections            %d of this agent, %d of others\n", s.Flows, s.Older)
	if s.Next != "" {
		fmt.Fprintf(e.out, "next                   %s\n", printable.Text(s.Next))
	}
}

func (e *env) proxyWatch(c *ucli.Context) error {
	e.programs.Watch(c.Context, e.err)
	return nil
}

// proxyChange asks for a change, waits for the restart if there is one, and prints the new state. It fails if that is
// none of want.
func (e *env) proxyChange(path string, want ...string) ucli.ActionFunc {
	return func(c *ucli.Context) error {
		client := admin.NewClient(c.String("socket"))
		var before admin.Info
		if err := client.Get(c.Context, "/v1/status", &before); err != nil {
			return err
		}
		var change admin.ProxyChange
		if err := client.Post(c.Context, path, &change); err != nil {
			return err
		}
		for _, what := range change.Removed {
			fmt.Fprintln(e.out, "removed:", printable.Text(what))
		}
		if change.Restarting {
			if _, err := awaitRestart(c.Context, client, before); err != nil {
				return err
			}
		}
		var s admin.ProxyState
		if err := client.Get(c.Context, "/v1/proxy", &s); err != nil {
			return err
		}
		e.showProxy(s)
		if !slices.Contains(want, s.State) {
			return errors.New("the agent could not do that; \"steelyard status\" says why")
		}
		return nil
	}
}
