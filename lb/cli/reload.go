package cli

import (
	"errors"
	"fmt"
	"net/http"

	ucli "github.com/urfave/cli/v2"

	"github.com/steelyard-lb/steelyard/lb/admin"
)

// reload makes the running agent read its configuration file again, and fails when the agent rejects the file.
func (e *env) reload(c *ucli.Context) error {
	var now admin.Reloaded
	err := admin.NewClient(c.String("socket")).Post(c.Context, "/v1/reload", &now)
	var refused *admin.RefusedError
	if errors.As(err, &refused) && refused.Code == http.StatusUnprocessableEntity {
		fmt.Fprintf(e.err, "%s\nrejected; the running configuration stays in force\n", refused.Problem)
		return errReported
	}
	if err != nil {
		return err
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
