package cli

import (
	"errors"
	"fmt"
	"os/signal"
	"syscall"

	ucli "github.com/urfave/cli/v2"

	"github.com/steelyard-lb/steelyard/lb/admin"
	"github.com/steelyard-lb/steelyard/lb/printable"
	"github.com/steelyard-lb/steelyard/systemd"
)

func (e *env) run(c *ucli.Context) error {
	return e.programs.Run(c.Context, c.String("config"), version, e.err)
}

func (e *env) allocate(c *ucli.Context) error {
	return e.programs.Allocate(c.Context, c.String("config"), version, e.err)
}

func (e *env) cleanup(c *ucli.Context) error {
	for _, name := range []string{"kubeconfig", "namespace"} {
		if c.IsSet(name) && !c.Bool("cluster") { // the user did not mean to clean up the node
			return fmt.Errorf("%w: --%s needs --cluster", errUsage, name)
		}
	}
	if c.Bool("cluster") && c.Bool("wait") {
		return fmt.Errorf("%w: --wait cannot be combined with --cluster", errUsage)
	}
	if c.Bool("cluster") {
		return e.programs.CleanupCluster(c.Context, c.String("kubeconfig"), c.String("namespace"), e.out)
	}
	if err := e.programs.Cleanup(e.err, c.Bool("without-proxy")); err != nil {
		return err
	}
	_, err := fmt.Fprintln(e.out, "Steelyard has been removed from the kernel")
	if c.Bool("wait") {
		ctx, stop := signal.NotifyContext(c.Context, syscall.SIGTERM, syscall.SIGINT)
		defer stop()
		<-ctx.Done()
	}
	return err
}

func (e *env) install(*ucli.Context) error { return systemd.Install(e.out, "/") }

func (e *env) uninstall(*ucli.Context) error {
	return systemd.Uninstall(e.out, "/", e.programs.Remains)
}

// withoutAgent says, after an error, whether the kernel still forwards for a stopped agent.
func (e *env) withoutAgent(err error) {
	if !errors.Is(err, admin.ErrNoAgent) {
		return
	}
	switch left, err := e.programs.Left(); {
	case err != nil:
		fmt.Fprintf(e.out, "kernel  not known: %s\n", printable.Text(err.Error()))
	case left != "":
		fmt.Fprintf(e.out, "kernel  %s\n        -> start the agent, or run steelyard cleanup\n", printable.Text(left))
	}
}
