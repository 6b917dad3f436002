package cli

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"net/url"
	"os"
	"path/filepath"
	"slices"
	"sync"

	ucli "github.com/urfave/cli/v2"

	"github.com/steelyard-lb/steelyard/config"
	"github.com/steelyard-lb/steelyard/lb"
	"github.com/steelyard-lb/steelyard/lb/admin"
)

// drainer keeps what an operator has taken out of service. It outlives the agent, and not the machine: a node that was booted
// again is to work.
type drainer struct {
	path   string
	engine *lb.Engine

	mu sync.Mutex // guards is
	is lb.Drains
}

// openDrainer reads what is drained and tells the engine.
func openDrainer(dir string, e *lb.Engine) (*drainer, error) {
	d := &drainer{path: filepath.Join(dir, "drained.json"), engine: e}
	text, err := os.ReadFile(d.path)
	if errors.Is(err, fs.ErrNotExist) {
		return d, nil
	}
	if err == nil {
		err = json.Unmarshal(text, &d.is)
	}
	if err != nil {
		return nil, fmt.Errorf("read what is drained: %w", err)
	}
	e.Drain(d.is)
	return d, nil
}

// set drains a service, or with "" the node, or ends that. A service that is not there can only be undrained.
func (d *drainer) set(ctx context.Context, service string, on bool) (lb.Drains, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if service != "" && on {
		st, err := d.engine.Status(ctx)
		if err != nil {
			return d.is, err
		}
		if !slices.ContainsFunc(st.Services, func(s lb.ServiceStatus) bool { return s.Service == service }) {
			return d.is, fmt.Errorf("there is no service %q; see \"steelyard services\"", service)
		}
	}
	next := d.is.With(service, on)
	text, err := json.Marshal(next)
	if err != nil {
		return d.is, fmt.Errorf("write what is drained: %w", err)
	}
	if err := d.write(text); err != nil {
		return d.is, fmt.Errorf("write what is drained: %w", err)
	}
	d.is = next
	d.engine.Drain(next)
	return next, nil
}

// write replaces the file as a whole: an agent that is killed meanwhile leaves none that the next one cannot read.
func (d *drainer) write(text []byte) error {
	if err := os.MkdirAll(filepath.Dir(d.path), 0o755); err != nil {
		return err
	}
	if err := os.WriteFile(d.path+".new", text, 0o644); err != nil {
		return err
	}
	return os.Rename(d.path+".new", d.path)
}

// drain returns the commands drain and undrain.
func (e *env) drain(name, usage string) *ucli.Command {
	return &ucli.Command{
		Name: name, Usage: usage, ArgsUsage: "[SERVICE]",
		Flags: []ucli.Flag{
			&ucli.BoolFlag{Name: "node", Usage: "everything on this machine"},
			&ucli.StringFlag{Name: "socket", Value: config.Default().Admin.Socket, Usage: "`PATH` of the agent's admin.socket", EnvVars: []string{"STEELYARD_SOCKET"}},
		},
		Action: func(c *ucli.Context) error {
			if c.Bool("node") == (c.NArg() == 1) {
				return fmt.Errorf("%w: want either SERVICE or --node", errUsage)
			}
			var now lb.Drains
			query := url.Values{"service": {c.Args().First()}}
			if c.Bool("node") {
				query = url.Values{"node": {"true"}}
			}
			if err := admin.NewClient(c.String("socket")).Post(c.Context, "/v1/"+name+"?"+query.Encode(), &now); err != nil {
				return err
			}
			switch {
			case now.Node:
				fmt.Fprintln(e.out, "drained: the node")
			case len(now.Services) > 0:
				fmt.Fprintf(e.out, "drained: %v\n", now.Services)
			default:
				fmt.Fprintln(e.out, "drained: nothing")
			}
			return nil
		},
	}
}
