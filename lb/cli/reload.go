package cli

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"time"

	ucli "github.com/urfave/cli/v2"

	"github.com/steelyard-lb/steelyard/lb/admin"
	"github.com/steelyard-lb/steelyard/lb/printable"
)

// reload makes the running agent reread its configuration file, and fails if the agent rejects it.
func (e *env) reload(c *ucli.Context) error {
	var now admin.Reloaded
	path := "/v1/reload?" + url.Values{"force": {c.String("force")}}.Encode()
	err := admin.NewClient(c.String("socket")).Post(c.Context, path, &now)
	if err != nil {
		return e.rejected(err, "the running configuration stays active")
	}
	e.difference(now)
	_, err = fmt.Fprintf(e.out, "reloaded: %s\n", now.Config)
	return err
}

// diff prints what reload would change, with the agent's configuration file or with another one.
func (e *env) diff(c *ucli.Context) error {
	asJSON, err := wantJSON(c, "text")
	if err != nil {
		return err
	}
	client := admin.NewClient(c.String("socket"))
	var then admin.Reloaded
	if c.NArg() == 0 {
		err = client.Get(c.Context, "/v1/diff", &then)
	} else {
		then, err = sendFile(c.Context, client, "/v1/diff", c.Args().First(), url.Values{})
	}
	if err != nil {
		return e.rejected(err, "a reload would change nothing")
	}
	if asJSON {
		return e.asJSON(then)
	}
	e.difference(then)
	if len(then.Changes) == 0 {
		fmt.Fprintln(e.out, "no difference")
	}
	return nil
}

func (e *env) asJSON(x any) error {
	to := json.NewEncoder(e.out)
	to.SetIndent("", "  ")
	return to.Encode(x)
}

// configShow prints the active file, byte for byte.
func (e *env) configShow(c *ucli.Context) error {
	var now admin.Text
	if err := admin.NewClient(c.String("socket")).Get(c.Context, "/v1/config", &now); err != nil {
		return err
	}
	_, err := io.WriteString(e.out, now.Text)
	return err
}

// difference prints changes to stdout, and what needs attention to stderr.
func (e *env) difference(r admin.Reloaded) {
	for _, w := range r.Warnings {
		fmt.Fprintln(e.err, "warning:", printable.Text(w))
	}
	for _, section := range r.NeedRestart {
		fmt.Fprintf(e.err, "warning: [%s] has changed; the change takes effect at the next start\n", section)
	}
	for _, change := range r.Changes {
		fmt.Fprintln(e.out, printable.Text(change.String()))
	}
}

// rejected reports what is wrong with a configuration that the agent rejects, and returns other errors.
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

// restart replaces the running agent with a new one, and waits until the new one is ready.
func (e *env) restart(c *ucli.Context) error {
	client := admin.NewClient(c.String("socket"))
	var before, now admin.Info
	if err := client.Get(c.Context, "/v1/status", &before); err != nil {
		return err
	}
	err := client.Post(c.Context, "/v1/restart", &struct{}{})
	var refused *admin.RefusedError
	if errors.As(err, &refused) && refused.Code == http.StatusNotFound {
		return fmt.Errorf("the running agent (%s) is from an earlier release that cannot replace itself: "+
			"kill it with \"kill -9\" (systemd: \"systemctl kill -s KILL steelyard\"), and start the new one unless "+
			"a service manager does; packets are still forwarded, and BGP peers with graceful restart keep the routes",
			before.Version)
	}
	if err != nil {
		return e.rejected(err, "the running agent continues")
	}
	if now, err = awaitRestart(c.Context, client, before); err != nil {
		return err
	}
	_, err = fmt.Fprintf(e.out, "restarted: version %s\n", now.Version)
	return err
}

// awaitRestart waits until another agent than the one with the status before is ready, and returns its status.
func awaitRestart(ctx context.Context, client *admin.Client, before admin.Info) (now admin.Info, err error) {
	ctx, cancel := context.WithTimeout(ctx, restartTimeout)
	defer cancel()
	for {
		err := client.Get(ctx, "/v1/status", &now)
		if err == nil && !now.Started.Equal(before.Started) && (now.Settled || now.Waiting != "") {
			return now, nil
		}
		select {
		case <-ctx.Done():
			return now, fmt.Errorf("the new agent is not ready after %s; see its log", restartTimeout)
		case <-time.After(100 * time.Millisecond):
		}
	}
}
