package cli

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"net/url"
	"os"
	"path/filepath"
	"time"

	ucli "github.com/urfave/cli/v2"
	"golang.org/x/sys/unix"

	"github.com/steelyard-lb/steelyard/lb/admin"
)

// applyCommands returns the commands apply and confirm.
func (e *env) applyCommands() (apply, confirm *ucli.Command) {
	apply = &ucli.Command{
		Name: "apply", Usage: "apply a configuration, and replace the agent's file with it", ArgsUsage: "FILE",
		Description: "With --confirm, the agent replaces its file only once you confirm the configuration. Otherwise " +
			"the previous one becomes active again at the end of the time, or if the agent ends before.",
		Flags: []ucli.Flag{
			&ucli.StringFlag{Name: "confirm", Usage: "go back unless it is confirmed within `TIME`, such as 60s"},
			&ucli.StringFlag{Name: "force", Usage: "permit the refused change whose error contains this `WORD`"},
			socketFlag(),
		},
		Action: e.apply,
	}
	confirm = &ucli.Command{
		Name: "confirm", Usage: "keep the configuration that \"steelyard apply --confirm\" has applied",
		Flags:  []ucli.Flag{socketFlag()},
		Action: func(c *ucli.Context) error { return e.confirm(c.Context, admin.NewClient(c.String("socket"))) },
	}
	return apply, confirm
}

func (e *env) apply(c *ucli.Context) error {
	query := url.Values{"force": {c.String("force")}}
	if c.IsSet("confirm") {
		if _, err := admin.ParseConfirm(c.String("confirm")); err != nil {
			return fmt.Errorf("%w: --%w", errUsage, err)
		}
		query.Set("confirm", c.String("confirm"))
	}
	client := admin.NewClient(c.String("socket"))
	now, err := sendFile(c.Context, client, "/v1/apply", c.Args().First(), query)
	if err != nil {
		return e.rejected(err, "the running configuration stays active")
	}
	e.difference(now)
	if now.ConfirmUntil.IsZero() {
		_, err := fmt.Fprintf(e.out, "applied: %s\n", now.Config)
		return err
	}
	fmt.Fprintf(e.out, "applied until %s; \"steelyard confirm\" keeps it\n", now.ConfirmUntil.Format(time.TimeOnly))
	if terminalOf(os.Stdin) == nil {
		return nil
	}
	fmt.Fprintln(e.out, "Press Enter to keep it, or Ctrl-C to go back at once.")
	return e.awaitConfirm(c.Context, client, now, entered(os.Stdin))
}

// entered returns a channel that receives once somebody presses Enter from now on. The end of the terminal, as when a
// connection is cut, is not Enter.
func entered(terminal *os.File) <-chan struct{} {
	c := make(chan struct{}, 1)
	unix.IoctlSetInt(int(terminal.Fd()), unix.TCFLSH, unix.TCIFLUSH) // keys pressed before the question
	go func() {
		if _, err := bufio.NewReader(terminal).ReadString('\n'); err == nil {
			c <- struct{}{}
		}
	}()
	return c
}

// awaitConfirm confirms a configuration when keep receives, and goes back when ctx ends. It fails unless the
// configuration is confirmed, here or elsewhere.
func (e *env) awaitConfirm(
	ctx context.Context, client *admin.Client, tried admin.Reloaded, keep <-chan struct{},
) error {
	for {
		select {
		case <-keep:
			return e.confirm(ctx, client)
		case <-ctx.Done():
			if err := client.Post(context.WithoutCancel(ctx), "/v1/reload", new(admin.Reloaded)); err != nil {
				return fmt.Errorf("the agent will go back at %s, but not yet: %w",
					tried.ConfirmUntil.Format(time.TimeOnly), err)
			}
			return errors.New("the previous configuration is active again")
		case <-time.After(time.Second):
		}
		var now admin.Info
		err := client.Get(ctx, "/v1/status", &now)
		switch {
		case ctx.Err() != nil || err == nil && !now.ConfirmUntil.IsZero():
		case err != nil:
			return fmt.Errorf("%w; an agent that starts has the previous configuration", err)
		case now.Loaded.Equal(tried.Loaded):
			_, err := fmt.Fprintf(e.out, "confirmed: %s\n", now.Config)
			return err
		default:
			return errors.New("not confirmed; the previous configuration is active again")
		}
	}
}

func (e *env) confirm(ctx context.Context, client *admin.Client) error {
	var now admin.Reloaded
	if err := client.Post(ctx, "/v1/confirm", &now); err != nil {
		return err
	}
	e.difference(now)
	_, err := fmt.Fprintf(e.out, "confirmed: %s\n", now.Config)
	return err
}

// sendFile posts a configuration file, because the agent may not see it, for example from a container.
func sendFile(
	ctx context.Context, client *admin.Client, path, name string, query url.Values,
) (then admin.Reloaded, err error) {
	full, err := filepath.Abs(name)
	if err != nil {
		return then, err
	}
	text, err := os.ReadFile(full)
	if err != nil {
		return then, err
	}
	query.Set("name", full)
	err = client.Send(ctx, path+"?"+query.Encode(), text, &then)
	return then, err
}
