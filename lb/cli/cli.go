package cli

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"slices"
	"strings"

	ucli "github.com/urfave/cli/v2"

	"github.com/steelyard-lb/steelyard/config"
	"github.com/steelyard-lb/steelyard/lb/admin"
	"github.com/steelyard-lb/steelyard/lb/events"
	"github.com/steelyard-lb/steelyard/lb/printable"
)

// Set by the linker (-X).
var (
	version = "0.1.0-dev"
	image   = "steelyard-lb/steelyard" // without a tag
)

// errUsage marks errors in the arguments; the exit code is 2.
var errUsage = errors.New("wrong usage")

// DefaultConfig is the configuration file when -c names none.
const DefaultConfig = "/etc/steelyard/steelyard.toml"

// Programs are the commands that are not clients of the admin API. All fields are required.
type Programs struct {
	// Run runs the agent with a configuration file until ctx ends, and logs to errOut. version is the binary's.
	Run func(ctx context.Context, configFile, version string, errOut io.Writer) error
	// Allocate assigns a cluster's addresses until ctx ends, and does nothing else. Its arguments are Run's.
	Allocate func(ctx context.Context, configFile, version string, errOut io.Writer) error
	// Watch attaches the service proxy's programs to the interfaces of new pods until ctx ends.
	Watch func(ctx context.Context, errOut io.Writer)
	// Check reads and validates a configuration file; with elsewhere the file is for another machine. Its error is a
	// config.Errors unless the machine cannot be read.
	Check func(configFile string, elsewhere bool) (*config.Config, error)
	// Demo runs the demo, and DemoRouter one of its processes.
	Demo       func(ctx context.Context, out io.Writer) error
	DemoRouter func(ctx context.Context, errOut io.Writer) error
	// DemoShell opens a shell in the network of the demo, with an incident, or without one if its name is "".
	DemoShell func(ctx context.Context, out io.Writer, incident string) error
	// Incidents are the names of incidents, and what a client says about each.
	Incidents [][2]string
	// Schema is the version of the layout of the tables in the kernel.
	Schema string
	// Events returns the events that the last agent has stored, for use while none runs.
	Events func(events.Filter) ([]events.Event, error)
	// Cleanup removes everything Steelyard has put into the kernel. It refuses if the node would have no service proxy,
	// unless withoutProxy is true.
	Cleanup func(errOut io.Writer, withoutProxy bool) error
	// Remains reports whether there is something for Cleanup to remove: an agent is running, or has left its programs.
	Remains func() (bool, error)
	// Left says what the programs of a stopped agent still do, or returns "" if there are none.
	Left func() (string, error)
	// Network writes the interfaces, addresses, routes, rules and neighbours of this machine.
	Network func(io.Writer) error
	// CleanupCluster removes what Steelyard has written to a cluster's Services, and its own objects from the
	// namespace. With kubeconfig "" it uses kubectl's default.
	CleanupCluster func(ctx context.Context, kubeconfig, namespace string, out io.Writer) error
}

// env is the environment of a command.
type env struct {
	out, err io.Writer
	terminal *os.File // terminalOf(out)
	programs Programs
}

// painted returns a text with colours if they are wanted (no-color.org).
func (e *env) painted(text string) string {
	if e.terminal == nil || os.Getenv("NO_COLOR") != "" {
		return text
	}
	return paint(text)
}

// Main runs the command in args and returns the exit code.
func Main(ctx context.Context, args []string, out, errOut io.Writer, p Programs) int {
	app := newApp(&env{out, errOut, terminalOf(out), p})
	err := app.RunContext(ctx, append([]string{"steelyard"}, flagsFirst(app.Commands, args)...))
	var v verdictError
	if errors.As(err, &v) {
		if !errors.Is(err, errReported) {
			fmt.Fprintf(errOut, "steelyard: %s\n", printableLines(err.Error()))
		}
		return slices.Index(admin.Verdicts, v.verdict)
	}
	switch {
	case err == nil:
		return 0
	case errors.Is(err, errUsage):
		problem := strings.TrimPrefix(err.Error(), errUsage.Error()+": ")
		fmt.Fprintf(errOut, "steelyard: %s\nSee \"steelyard help\".\n", printableLines(problem))
		return 2
	case errors.Is(err, errReported):
		return 1
	default:
		fmt.Fprintf(errOut, "steelyard: %s%s\n", printableLines(err.Error()), remedy(err, os.Geteuid()))
		return 1
	}
}

// printableLines makes every line of an error printable, because an error may quote a program or the API.
func printableLines(s string) string {
	lines := slices.Compact(strings.Split(s, "\n")) // several parts may fail with the same error
	for i, line := range lines {
		lines[i] = printable.Text(line)
	}
	return strings.Join(lines, "\n")
}

// remedy returns advice for an error that root would not have had. Configuration errors have their own remedies.
func remedy(err error, euid int) string {
	if errors.Is(err, fs.ErrPermission) && euid != 0 && !errors.As(err, new(config.Errors)) {
		return "; use sudo"
	}
	return ""
}

// errReported marks errors that the command has already written to stderr.
var errReported = errors.New("see above")

func newApp(e *env) *ucli.App {
	app := &ucli.App{
		Name: "steelyard", Usage: "announce addresses, balance their traffic, and check their servers",
		HideVersion: true, EnableBashCompletion: true, Writer: e.out, ErrWriter: e.err,
		Flags:          []ucli.Flag{&ucli.BoolFlag{Name: "version", Usage: "print the version"}},
		OnUsageError:   usageError,
		ExitErrHandler: func(*ucli.Context, error) {}, // Main returns the exit code
		Action: func(c *ucli.Context) error {
			if name := c.Args().First(); name != "" {
				return fmt.Errorf("%w: no command %q. %s", errUsage, name, ucli.SuggestCommand(c.App.Commands, name))
			}
			if c.Bool("version") {
				return e.version(c)
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

// commands returns the command table. Nouns only read; verbs change something.
func commands(e *env) []*ucli.Command {
	with := func(f ...ucli.Flag) []ucli.Flag { return f }
	apply, confirm := e.applyCommands()
	return []*ucli.Command{
		{
			Name: "run", Usage: "run the agent; SIGHUP reloads it, and SIGTERM withdraws the routes and stops it",
			Flags: with(configFlag()), Action: e.run,
		},
		{
			Name: "allocate", Usage: "assign addresses to a cluster's Services, but neither announce nor forward",
			Flags: with(configFlag()), Action: e.allocate,
		},
		{
			Name: "check", Usage: "validate a configuration and report every error", ArgsUsage: "[FILE]",
			Flags: with(configFlag(), outputFlag("text"), &ucli.BoolFlag{
				Name: "elsewhere", Usage: "do not compare the file with this machine, because it is for another",
			}),
			Action: e.check,
		},
		{
			Name: "reload", Usage: "make the running agent read its configuration again",
			Flags: with(socketFlag(), &ucli.StringFlag{
				Name: "force", Usage: "permit the refused change whose error contains this `WORD`",
			}),
			Action: e.reload,
		},
		{
			Name: "config", Usage: "show the active configuration", Action: func(c *ucli.Context) error {
				return fmt.Errorf("%w: want \"steelyard config show\"", errUsage)
			},
			Subcommands: []*ucli.Command{{
				Name: "show", Usage: "print the active file", Flags: with(socketFlag()), Action: e.configShow,
			}},
		},
		{
			Name: "diff", Usage: "print what a reload would change", ArgsUsage: "[FILE]",
			Flags: with(outputFlag("text"), socketFlag()), Action: e.diff,
		},
		apply, confirm,
		e.importCommand(),
		e.proxy(),
		{
			Name: "restart", Usage: "replace the running agent with a new one; BGP peers keep the routes",
			Flags: with(socketFlag()), Action: e.restart,
		},
		e.demo(),
		e.status(),
		e.services(),
		e.ofServices("backends", "list backends with their traffic, and the results and durations of their checks",
			"/v1/backends", backendsTable),
		e.routes(),
		e.peers(),
		e.list("members", "other members of [l2]", "/v1/members", membersTable),
		e.flows(),
		e.events(),
		e.explain(),
		e.doctor(),
		e.top(),
		e.trace(),
		e.drain("drain", "withdraw the addresses of a service or this node, or give a server no new connections"),
		e.drain("undrain", "use a drained service, node or server again"),
		e.weight(),
		{Name: "install", Usage: "install this binary as a systemd service", Action: e.install},
		{Name: "uninstall", Usage: "remove the systemd service, but not the configuration", Action: e.uninstall},
		e.manifest(),
		{
			Name: "cleanup", Usage: "remove everything that Steelyard has put into the kernel", Action: e.cleanup,
			Flags: with(
				&ucli.BoolFlag{Name: "wait", Usage: "then wait for SIGTERM, as the pods of manifest --cleanup do"},
				&ucli.BoolFlag{
					Name: "without-proxy", Usage: "even if no program serves this node's Services then",
				},
				&ucli.BoolFlag{
					Name: "cluster", Usage: "clean up a cluster instead: remove finalizers, addresses, Leases, keys",
				},
				&ucli.StringFlag{
					Name: "kubeconfig", Usage: "with --cluster: use the kubeconfig `FILE`; default: kubectl's",
				},
				&ucli.StringFlag{
					Name: "namespace", Value: "steelyard",
					Usage: "with --cluster: remove Leases and keys from the namespace `NAME`",
				},
			),
		},
		{Name: "version", Usage: "print the version", Action: e.version},
		{
			Name: "completion", Usage: "print the completion script for bash, zsh or fish", ArgsUsage: "SHELL",
			UsageText: "source <(steelyard completion bash)", Action: e.completion,
		},
		{Name: "man", Hidden: true, Usage: "print the manual page that packages contain", Action: e.man},
		{Name: "demo-router", Hidden: true, Usage: "run the router of the demo", Action: e.demoRouter},
	}
}

func configFlag() *ucli.StringFlag {
	return &ucli.StringFlag{
		Name: "config", Aliases: []string{"c"}, Value: DefaultConfig, Usage: "read `FILE`",
		EnvVars: []string{"STEELYARD_CONFIG"},
	}
}

// outputFlag is the flag of commands that can also print JSON.
func outputFlag(form string) ucli.Flag {
	return &ucli.StringFlag{
		Name: "output", Aliases: []string{"o"}, Value: form, Usage: "print as `FORMAT`: " + form + " or json",
	}
}

// wantJSON reports whether --output is json, and refuses anything other than json and form.
func wantJSON(c *ucli.Context, form string) (bool, error) {
	format := c.String("output")
	if format != form && format != "json" {
		return false, fmt.Errorf("%w: -o %s: unknown format; allowed: %s, json", errUsage, format, form)
	}
	return format == "json", nil
}

// socketFlag is the flag of every command that is a client of the agent.
func socketFlag() ucli.Flag {
	return &ucli.StringFlag{
		Name: "socket", Value: config.Default().Admin.Socket, Usage: "connect to the agent's admin.socket at `PATH`",
		EnvVars: []string{"STEELYARD_SOCKET"},
	}
}

func usageError(_ *ucli.Context, err error, _ bool) error {
	problem := strings.ReplaceAll(err.Error(), "flag provided but not defined: ", "there is no flag ")
	return fmt.Errorf("%w: %s", errUsage, problem)
}

// strict makes a command reject extra arguments, which the library would ignore.
func strict(c *ucli.Command) {
	c.OnUsageError = usageError
	action := c.Action
	want := strings.Fields(c.ArgsUsage)
	optional := len(slices.DeleteFunc(slices.Clone(want), func(s string) bool { return !strings.HasPrefix(s, "[") }))
	several := strings.HasSuffix(c.ArgsUsage, "…")
	c.Action = func(cc *ucli.Context) error {
		if n := cc.NArg(); n > len(want) && !several || n < len(want)-optional {
			return fmt.Errorf("%w: %s takes %s, got %d", errUsage, c.Name, counted(len(want), "argument"), n)
		}
		return action(cc)
	}
	for _, sub := range c.Subcommands {
		strict(sub)
	}
}
