package cli

import (
	"context"
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"

	ucli "github.com/urfave/cli/v2"

	"github.com/steelyard-lb/steelyard/systemd"
)

// version is set when the binary is linked.
var version = "dev"

// errUsage marks errors of whoever typed the command; the exit code is 2.
var errUsage = errors.New("wrong usage")

// DefaultConfig is where the configuration is looked for when -c names none.
const DefaultConfig = "/etc/steelyard/steelyard.toml"

// env is what a command may touch of the outside.
type env struct {
	out, err io.Writer
}

// Main runs the command that args name and returns the exit code.
func Main(ctx context.Context, args []string, out, errOut io.Writer) int {
	err := newApp(&env{out, errOut}).RunContext(ctx, append([]string{"steelyard"}, args...))
	switch {
	case err == nil:
		return 0
	case errors.Is(err, errUsage):
		fmt.Fprintf(errOut, "steelyard: %v\nSee \"steelyard help\".\n", strings.TrimPrefix(err.Error(), errUsage.Error()+": "))
		return 2
	case errors.Is(err, errReported):
		return 1
	default:
		fmt.Fprintf(errOut, "steelyard: %v\n", err)
		return 1
	}
}

// errReported marks errors that the command has already written where they belong.
var errReported = errors.New("see above")

func newApp(e *env) *ucli.App {
	app := &ucli.App{
		Name: "steelyard", Usage: "announce, balance and check load-balancer addresses", HideVersion: true, HideHelpCommand: false,
		Writer: e.out, ErrWriter: e.err,
		OnUsageError:   usageError,
		ExitErrHandler: func(*ucli.Context, error) {}, // Main alone decides the exit code
		Action: func(c *ucli.Context) error {
			if c.NArg() > 0 {
				return fmt.Errorf("%w: no command %q", errUsage, c.Args().First())
			}
			return ucli.ShowAppHelp(c)
		},
		Commands: commands(e),
	}
	for _, c := range app.Commands {
		strict(c)
	}
	return app
}

// commands are all there are. Nouns only read; verbs change something.
func commands(e *env) []*ucli.Command {
	return []*ucli.Command{
		{Name: "run", Usage: "run the agent; SIGTERM withdraws then exits, SIGHUP reloads", Flags: []ucli.Flag{configFlag()}, Action: e.run},
		{Name: "check", Usage: "validate a configuration and report every error", Flags: []ucli.Flag{configFlag()}, Action: e.check},
		{Name: "demo", Usage: "show a whole network on this machine, in namespaces; needs root", Action: e.demo},
		e.status(),
		e.list("services", "frontends and whether they are announced", "/v1/services", servicesTable),
		e.list("backends", "backends and what their checks found", "/v1/backends", backendsTable),
		e.list("routes", "addresses and whether they are announced", "/v1/routes", routesTable),
		e.list("peers", "BGP neighbours", "/v1/peers", peersTable),
		e.flows(),
		e.explain(),
		e.drain("drain", "announce a service, or everything on this machine, no longer; what arrives is still served"),
		e.drain("undrain", "end that"),
		{Name: "install", Usage: "install this binary as a systemd service", Action: e.install},
		{Name: "uninstall", Usage: "remove the systemd service; the configuration stays", Action: e.uninstall},
		{Name: "manifest", Usage: "print the Kubernetes objects that run the agent on every node", Flags: []ucli.Flag{
			&ucli.StringFlag{Name: "image", Value: "steelyard:" + version, Usage: "`IMAGE` of the agent"},
		}, Action: func(c *ucli.Context) error {
			_, err := fmt.Fprint(e.out, systemd.Manifest(c.String("image")))
			return err
		}},
		{Name: "cleanup", Usage: "remove every trace of Steelyard from the kernel", Action: e.cleanup},
		{Name: "version", Usage: "print the version", Action: func(*ucli.Context) error {
			_, err := fmt.Fprintln(e.out, version)
			return err
		}},
		{Name: "demo-router", Hidden: true, Usage: "the router of the demo", Action: e.demoRouter},
	}
}

func configFlag() ucli.Flag {
	return &ucli.StringFlag{Name: "config", Aliases: []string{"c"}, Value: DefaultConfig, Usage: "read `FILE`", EnvVars: []string{"STEELYARD_CONFIG"}}
}

func usageError(_ *ucli.Context, err error, _ bool) error { return fmt.Errorf("%w: %w", errUsage, err) }

// strict makes a command refuse what the library would silently take: flags after arguments, and arguments too many.
func strict(c *ucli.Command) {
	c.OnUsageError = usageError
	action := c.Action
	want := strings.Fields(c.ArgsUsage)
	optional := len(slices.DeleteFunc(slices.Clone(want), func(s string) bool { return !strings.HasPrefix(s, "[") }))
	c.Action = func(cc *ucli.Context) error {
		for _, a := range cc.Args().Slice() {
			if strings.HasPrefix(a, "-") {
				return fmt.Errorf("%w: flag %s must stand before the arguments", errUsage, a)
			}
		}
		if n := cc.NArg(); n > len(want) || n < len(want)-optional {
			return fmt.Errorf("%w: %s takes %d arguments, got %d", errUsage, c.Name, len(want), n)
		}
		return action(cc)
	}
	for _, sub := range c.Subcommands {
		strict(sub)
	}
}
