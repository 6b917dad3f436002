package cli

import (
	"errors"
	"fmt"
	"os/exec"
	"slices"
	"text/tabwriter"

	ucli "github.com/urfave/cli/v2"
)

func (e *env) demo() *ucli.Command {
	return &ucli.Command{
		Name: "demo", Usage: "run an example network in namespaces; needs root",
		UsageText: "steelyard demo\nsteelyard demo --shell\nsteelyard demo --break random",
		Description: "Without options, it plays failures and maintenance. In the shell, the names of the hosts are\n" +
			"commands: client1 curl http://203.0.113.10/, lb1 steelyard doctor, router ip route.",
		Flags: []ucli.Flag{
			&ucli.BoolFlag{Name: "shell", Usage: "open a shell in the network instead; it stays until the shell ends"},
			&ucli.StringFlag{
				Name: "break", Usage: "open a shell, with the incident `NAME`; list prints the names",
			},
		},
		Action: e.playDemo,
	}
}

func (e *env) playDemo(c *ucli.Context) error {
	name := c.String("break")
	if name == "list" {
		return e.listIncidents()
	}
	if c.IsSet("break") && !slices.ContainsFunc(e.programs.Incidents, func(i [2]string) bool { return i[0] == name }) {
		return errors.Join(fmt.Errorf("%w: there is no incident %q", errUsage, name), e.listIncidents())
	}
	if !c.Bool("shell") && name == "" {
		return e.programs.Demo(c.Context, e.out)
	}
	err := e.programs.DemoShell(c.Context, e.out, name)
	if errors.As(err, new(*exec.ExitError)) {
		return errReported // by the process in the namespace
	}
	return err
}

func (e *env) listIncidents() error {
	w := tabwriter.NewWriter(e.out, 0, 0, 2, ' ', 0)
	for _, i := range e.programs.Incidents {
		fmt.Fprintf(w, "%s\t%s\n", i[0], i[1])
	}
	return w.Flush()
}

func (e *env) demoRouter(c *ucli.Context) error { return e.programs.DemoRouter(c.Context, e.err) }
