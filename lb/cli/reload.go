package cli

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"time"

	ucli "github.com/urfave/cli/v2"

	"github.com/steelyard-lb/steelyard/lb/admin"
)

// reload makes the running agent read its configuration file again, and fails when the agent rejects the file.
func (e *env) reload(c *ucli.Context) error {
	var now admin.Reloaded
	err := admin.NewClient(c.String("socket")).Post(c.Context, "/v1/reload", &now)
	if err != nil {
		return e.rejected(err, "the running configuration stays in force")
	}
	for _, w := range now.Warnings {
		fmt.Fprintln(e.err, "warning:", w)
	}
	for _, section := range now.NeedRestart {
		fmt.Fprintf(e.err, "warning: [%s] has changed; the change takes effect at the next start\n", section)
	}
	_, err = fmt.Fprintf(e.out, "reloaded: %s\n", now.Config)
	return err
}

// rejected reports what the agent finds in a configuration that it rejects, and returns other errors.
func (e *env) rejected(err error, stays string) error {
	var refused *admin.RefusedError
	if !errors.As(err, &refused) || refused.Code != http.StatusUnprocessableEntity {
		return err
	}
	fmt.Fprintf(e.err, "%s\nrejected; %s\n", printableLines(refused.Problem), stays)
	return errReported
}

// restartTimeout is the time in which a new agent must be ready.
const restartTimeout = 2 * time.Minute

// restart replaces the running agent by a new one, and waits until that is ready.
func (e *env) restart(c *ucli.Context) error {
	client := admin.NewClient(c.String("socket"))
	var before, now admin.Info
	if err := client.Get(c.Context, "/v1/status", &before); err != nil {
		return err
	}
	err := client.Post(c.Context, "/v1/restart", &struct{}{})
	var refused *admin.RefusedError
	if errors.As(err, &refused) && refused.Code == http.StatusNotFound {
		return fmt.Errorf("the running agent (%s) is of an earlier release, which cannot replace itself: end it with "+
			"\"kill -9\" (systemd: \"systemctl kill -s KILL steelyard\"), and start the new one if nothing does; "+
			"packets are forwarded meanwhile, and BGP peers with graceful restart keep the routes", before.Version)
	}
	if err != nil {
		return e.rejected(err, "the running agent goes on")
	}
	ctx, cancel := context.WithTimeout(c.Context, restartTimeout)
	defer cancel()
	for {
		err := client.Get(ctx, "/v1/status", &now)
		if err == nil && !now.Started.Equal(before.Started) && (now.Settled || now.Waiting != "") {
			_, err := fmt.Fprintf(e.out, "restarted: version %s\n", now.Version)
			return err
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("the new agent is not ready after %s; see its log", restartTimeout)
		case <-time.After(100 * time.Millisecond):
		}
	}
}
