package cli

import (
	"fmt"
	"io"
	"strings"

	ucli "github.com/urfave/cli/v2"

	"github.com/steelyard-lb/steelyard/lb"
	"github.com/steelyard-lb/steelyard/lb/admin"
)

// services returns a list command that can show the service proxy's part.
func (e *env) services() *ucli.Command {
	cmd := e.ofServices("services", "list frontends with their traffic, and whether they are announced",
		"/v1/services", servicesTable)
	cmd.Flags = append(cmd.Flags, &ucli.BoolFlag{
		Name: "inside", Usage: "list instead what the service proxy serves to this node and its pods",
	})
	all := cmd.Action
	cmd.Action = func(c *ucli.Context) error {
		if c.Bool("inside") {
			return e.show(c, "/v1/services?scope="+string(lb.ScopeInside), rulesTable)
		}
		return all(c)
	}
	return cmd
}

func rulesTable(w io.Writer, answer []byte) error {
	return rows(w, answer, "SERVICE\tADDRESS\tENDPOINTS\tFROM OUTSIDE\tALLOW", func(r lb.NodeRule) []any {
		outside, allow := "-", "all"
		if r.Outside != nil {
			outside = choice(*r.Outside)
		}
		if r.Allow != nil {
			allow = strings.Trim(fmt.Sprint(r.Allow), "[]")
		}
		return []any{r.Name, lb.Frontend{VIP: r.Addr, Port: r.Port, Protocol: r.Protocol}, choice(r.Inside), outside,
			allow}
	})
}

// choice says what happens to new connections.
func choice(c lb.NodeChoice) string {
	switch {
	case len(c.Endpoints) > 0:
		names := make([]string, len(c.Endpoints))
		for i, at := range c.Endpoints {
			names[i] = at.String()
		}
		return admin.List(names)
	case c.Drop:
		return "dropped"
	}
	return "refused"
}
