package cli

import (
	"context"
	"errors"
	"fmt"
	"io"
	"strings"
	"text/tabwriter"

	ucli "github.com/urfave/cli/v2"

	"github.com/steelyard-lb/steelyard/lb"
	"github.com/steelyard-lb/steelyard/lb/admin"
)

// examination is the output of doctor -o json. The field names are a contract with users (docs/api.md).
type examination struct {
	Verdict admin.Verdict  `json:"verdict"` // by the worst finding of both
	Status  admin.Info     `json:"status"`
	Checks  []lb.Diagnosis `json:"checks"`
}

// doctor returns the command that prints what the agent knows, and then what its checks find.
func (e *env) doctor() *ucli.Command {
	file := configFlag()
	file.Usage = "without an agent: add the configuration in `FILE` to the bundle"
	return &ucli.Command{
		Name: "doctor", Usage: "ask the network for faults that status cannot see, within ten seconds",
		UsageText:   "steelyard doctor\nsteelyard doctor --bundle /tmp/report.tar.gz",
		Description: "Exits with 0 for OK, 1 for DEGRADED, 2 for DOWN or if no agent responds.",
		Flags: []ucli.Flag{
			&ucli.StringFlag{
				Name: "bundle", Usage: "write a support bundle without secrets to `FILE` (tar.gz)",
			},
			file, outputFlag("text"), socketFlag(),
		},
		Action: func(c *ucli.Context) error {
			asJSON, err := wantJSON(c, "text")
			if err != nil {
				return err
			}
			x, verdict := e.examine(c)
			switch {
			case c.Context.Err() != nil:
				return context.Cause(c.Context)
			case x != nil && asJSON:
				err = e.asJSON(x)
			case x != nil:
				err = x.print(e.out)
			case !errors.Is(verdict, admin.ErrPermission): // with that, the agent may be well
				fmt.Fprintf(e.out, "%s: %s\n", admin.Down, printableLines(verdict.Error()))
				e.withoutAgent(verdict)
			}
			if err == nil && c.String("bundle") != "" {
				err = e.bundle(c, x, verdict)
			}
			if err != nil {
				return err
			}
			return verdict
		},
	}
}

// examine asks the agent. Without an answer, it returns nil and the reason.
func (e *env) examine(c *ucli.Context) (*examination, error) {
	client := admin.NewClient(c.String("socket"))
	x := &examination{Checks: []lb.Diagnosis{}}
	if err := client.Get(c.Context, "/v1/status", &x.Status); err != nil {
		return nil, verdictError{admin.Down, err}
	}
	err := client.Get(c.Context, "/v1/doctor", &x.Checks)
	if refused := new(admin.RefusedError); errors.As(err, &refused) {
		x.Checks = []lb.Diagnosis{{Check: "all", NotAsked: refused.Error()}}
	} else if err != nil {
		return nil, verdictError{admin.Down, err}
	}
	x.Verdict = x.Status.Verdict
	for _, check := range x.Checks {
		for _, f := range check.Findings {
			if x.Verdict == admin.OK && f.Severity != lb.SeverityWarning {
				x.Verdict = admin.Degraded
			}
		}
	}
	if x.Verdict != admin.OK {
		return x, verdictError{x.Verdict, errReported}
	}
	return x, nil
}

// print writes the verdict with its first reason, the findings of the status, and a line for each check.
func (x *examination) print(w io.Writer) error {
	first := ""
	if len(x.Status.Reasons) > 0 {
		first = ": " + x.Status.Reasons[0]
	}
	for _, check := range x.Checks {
		if first == "" && len(check.Findings) > 0 && x.Verdict != admin.OK {
			first = ": " + check.Findings[0].Text
		}
	}
	tw := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	writeRow(w, string(x.Verdict)+first)
	finding := func(name string, f lb.Finding) {
		writeRow(tw, f.Severity, name, f.Text)
		if f.Remedy != "" {
			writeRow(tw, "", "", "-> "+f.Remedy)
		}
	}
	for _, f := range x.Status.Findings {
		finding("status", f)
	}
	for _, check := range x.Checks {
		for _, f := range check.Findings {
			finding(check.Check, f)
		}
		switch {
		case len(check.Findings) > 0:
		case check.NotAsked != "":
			writeRow(tw, "not asked", check.Check, check.NotAsked)
		default:
			writeRow(tw, "ok", check.Check, check.Expects)
		}
	}
	return tw.Flush()
}

// text returns what print writes.
func (x *examination) text() string {
	var b strings.Builder
	x.print(&b)
	return b.String()
}
