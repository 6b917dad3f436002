package cli

import (
	"bytes"
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/netip"
	"net/url"
	"slices"
	"strconv"
	"strings"
	"text/tabwriter"
	"time"

	ucli "github.com/urfave/cli/v2"

	"github.com/steelyard-lb/steelyard/lb"
	"github.com/steelyard-lb/steelyard/lb/admin"
	"github.com/steelyard-lb/steelyard/lb/printable"
)

// list returns a command that requests path from the agent and prints the response as a table, or as JSON.
func (e *env) list(name, usage, path string, table func(w io.Writer, answer []byte) error) *ucli.Command {
	return &ucli.Command{
		Name: name, Usage: usage,
		Flags:  []ucli.Flag{outputFlag("table"), socketFlag()},
		Action: func(c *ucli.Context) error { return e.show(c, path, table) },
	}
}

// show prints the agent's response to path in the format of --output.
func (e *env) show(c *ucli.Context, path string, table func(w io.Writer, answer []byte) error) error {
	answer, err := e.get(c, path)
	if err != nil {
		return err
	}
	return e.print(c, answer, table)
}

// get returns the agent's response to path.
func (e *env) get(c *ucli.Context, path string) (answer json.RawMessage, err error) {
	if _, err := wantJSON(c, "table"); err != nil {
		return nil, err
	}
	err = admin.NewClient(c.String("socket")).Get(c.Context, path, &answer)
	return answer, err
}

// print prints a response in the format of --output.
func (e *env) print(c *ucli.Context, answer json.RawMessage, table func(w io.Writer, answer []byte) error) error {
	var pretty bytes.Buffer
	if asJSON, _ := wantJSON(c, "table"); !asJSON {
		err := table(&pretty, answer)
		io.WriteString(e.out, e.painted(pretty.String()))
		return err
	}
	if err := json.Indent(&pretty, answer, "", "  "); err != nil {
		return fmt.Errorf("read the response: %w", err)
	}
	_, err := fmt.Fprintln(e.out, pretty.String())
	return err
}

// peersTimeout is the age after which an agent is ready with only some of its BGP sessions established.
const peersTimeout = 30 * time.Second

// status returns a list command with the flag --ready, which a rolling update waits for before it continues with the
// next node.
func (e *env) status() *ucli.Command {
	cmd := e.list("status", "print the state of the agent", "/v1/status", statusTable)
	cmd.Flags = append(cmd.Flags, &ucli.BoolFlag{
		Name: "ready", Usage: "fail until the configuration is active and BGP sessions are established",
	}, &ucli.BoolFlag{
		Name: "check", Usage: "exit with 0 for OK, 1 for DEGRADED, 2 for DOWN or if no agent responds",
	})
	show := cmd.Action
	cmd.Action = func(c *ucli.Context) error {
		err := show(c)
		if err != nil && c.String("output") != "json" && !errors.Is(err, errUsage) &&
			!errors.Is(err, admin.ErrPermission) {
			fmt.Fprintf(e.out, "%s: %s\n", admin.Down, printableLines(err.Error()))
			e.withoutAgent(err)
		}
		if !c.Bool("ready") && !c.Bool("check") {
			return err
		}
		var i admin.Info
		if err == nil {
			err = admin.NewClient(c.String("socket")).Get(c.Context, "/v1/status", &i)
		}
		switch {
		case err != nil && c.Bool("check") && !errors.Is(err, errUsage):
			return verdictError{admin.Down, err}
		case err != nil:
			return err
		}
		if c.Bool("ready") {
			err = notReady(i)
		}
		if c.Bool("check") && i.Verdict != admin.OK {
			return verdictError{i.Verdict, cmp.Or(err, errReported)}
		}
		return err
	}
	return cmd
}

// verdictError is the result of status --check.
type verdictError struct {
	verdict admin.Verdict
	err     error
}

func (e verdictError) Error() string { return e.err.Error() }

func (e verdictError) Unwrap() error { return e.err }

func notReady(i admin.Info) error {
	switch {
	case !i.Settled:
		return errors.New("not ready: the first health checks or the first sync of services is not complete")
	case i.PeersUp == i.Peers, i.PeersUp > 0 && time.Since(i.Started) > peersTimeout:
		return nil
	}
	return fmt.Errorf("not ready: %d of %d BGP sessions are established", i.PeersUp, i.Peers)
}

// routes returns a list command that can show the routes of one BGP peer.
func (e *env) routes() *ucli.Command {
	cmd := e.list("routes", "list addresses and whether they are announced", "", nil)
	cmd.Flags = append(cmd.Flags, &ucli.StringFlag{
		Name: "peer", Usage: "list the routes sent to the BGP peer `ADDRESS` instead, with their attributes",
	})
	cmd.Action = func(c *ucli.Context) error {
		if !c.IsSet("peer") {
			return e.show(c, "/v1/routes", routesTable)
		}
		return e.showPeer(c, "/v1/routes", sentTable)
	}
	return cmd
}

// explain returns the command that shows how a packet is processed.
func (e *env) explain() *ucli.Command {
	const usage = "print how the datapath processes a packet, step by step; fail if it does not forward the packet"
	cmd := e.list("explain", usage, "", nil)
	cmd.ArgsUsage = "CLIENT VIP:PORT[/tcp|udp|sctp]"
	cmd.Action = func(c *ucli.Context) error {
		if _, err := lb.ParseQuestion(c.Args().Get(0), c.Args().Get(1)); err != nil {
			return fmt.Errorf("%w: %w", errUsage, err)
		}
		query := url.Values{"client": {c.Args().Get(0)}, "to": {c.Args().Get(1)}}
		answer, err := e.get(c, "/v1/explain?"+query.Encode())
		if err != nil {
			return err
		}
		var x lb.Explanation
		if err := cmp.Or(json.Unmarshal(answer, &x), e.print(c, answer, explanation)); err != nil {
			return err
		}
		if x.Fault != "" || slices.Contains([]string{"drop", "reset", "refuse"}, x.Action) {
			return errReported // the client is not served
		}
		return nil
	}
	return cmd
}

func explanation(w io.Writer, answer []byte) error {
	var x lb.Explanation
	if err := json.Unmarshal(answer, &x); err != nil {
		return fmt.Errorf("read the response: %w", err)
	}
	to := netip.AddrPortFrom(x.Address, x.Port)
	first := fmt.Sprintf("%s to %s/%s: %s (%s)", x.Client, to, x.Protocol, x.Action, x.Reason)
	fmt.Fprintln(w, printable.Text(first))
	if x.Fault != "" {
		fmt.Fprintf(w, "no answer: %s\n", printable.Text(x.Fault))
	}
	for i, step := range x.Steps {
		fmt.Fprintf(w, "%3d. %s\n", i+1, printable.Text(step))
	}
	return nil
}

// rows decodes answer and writes a line for each of its elements.
func rows[T any](w io.Writer, answer []byte, header string, row func(T) []any) error {
	var all []T
	if err := json.Unmarshal(answer, &all); err != nil {
		return fmt.Errorf("read the response: %w", err)
	}
	tw := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	fmt.Fprintln(tw, header)
	for _, x := range all {
		writeRow(tw, row(x)...)
	}
	return tw.Flush()
}

// writeRow writes a row of a table, and makes every cell printable, because reasons quote servers and tenants.
func writeRow(w io.Writer, cells ...any) {
	texts := make([]string, len(cells))
	for i, cell := range cells {
		texts[i] = printable.Text(fmt.Sprint(cell))
	}
	fmt.Fprintln(w, strings.Join(texts, "\t"))
}

func routesTable(w io.Writer, answer []byte) error {
	return rows(w, answer, "ADDRESS\tANNOUNCED\tBY\tSINCE\tSERVICES\tREASON", func(r lb.RouteStatus) []any {
		announced := yesNo(r.Announced)
		if r.State == lb.RouteOffered {
			announced = string(r.State)
		}
		by := make([]string, len(r.By))
		for i, kind := range r.By {
			by[i] = string(kind)
		}
		return []any{r.Address, announced, dash(strings.Join(by, ",")), ago(r.Since), strings.Join(r.Services, ","),
			dash(r.Reason)}
	})
}

func sentTable(w io.Writer, answer []byte) error {
	const header = "PREFIX\tNEXT HOP\tAS PATH\tMED\tLOCAL PREF\tCOMMUNITIES\tBANDWIDTH\tSINCE"
	number := func(n *uint32) string {
		if n == nil {
			return "-"
		}
		return strconv.FormatUint(uint64(*n), 10)
	}
	return rows(w, answer, header, func(r lb.SentRoute) []any {
		path := strings.Trim(fmt.Sprint(r.ASPath), "[]")
		communities := slices.Concat(r.Communities, r.LargeCommunities, r.ExtendedCommunities)
		bandwidth := "-"
		if r.Bandwidth > 0 {
			bandwidth = fmt.Sprintf("%g Gbit/s", r.Bandwidth*8/1e9)
		}
		return []any{r.Prefix, r.NextHop, dash(path), number(r.MED), number(r.LocalPref),
			dash(strings.Join(communities, ",")), bandwidth, ago(r.At)}
	})
}

func statusTable(w io.Writer, answer []byte) error {
	var i admin.Info
	if err := json.Unmarshal(answer, &i); err != nil {
		return fmt.Errorf("read the response: %w", err)
	}
	fmt.Fprintln(w, printable.Text(i.Headline()))
	tw := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	line := func(name, format string, args ...any) {
		writeRow(tw, name, fmt.Sprintf(format, args...))
	}
	findings := func(warnings bool, name string) {
		for n, f := range i.Findings {
			if (f.Severity == lb.SeverityWarning) != warnings {
				continue
			}
			if n > 0 || warnings { // otherwise the first line says it
				line(name, "%s", f.Text)
			}
			if f.Remedy != "" {
				line("", "-> %s", f.Remedy)
			}
		}
	}
	findings(false, "also")
	line("node", "%s", i.Node)
	line("version", "%s, up %s", i.Version, ago(i.Started))
	line("config", "%s, loaded %s ago", i.Config, ago(i.Loaded))
	if i.LoadError != "" {
		name := "last reload"
		for text := range strings.SplitSeq("rejected: "+i.LoadError, "\n") {
			line(name, "%s", text)
			name = ""
		}
	}
	if c := i.Cluster; c != nil {
		state := "connected"
		if !c.Away.IsZero() {
			state = "API server unreachable for " + ago(c.Away)
		}
		if c.Leader != "" { // not known if this agent assigns none
			state += ", addresses are assigned by " + c.Leader
		}
		line("cluster", "%s", state)
	}
	if a := i.Allocator; a != nil {
		last := "it has decided nothing yet"
		if a.Last != "" {
			last = fmt.Sprintf("last decision %s ago: %s", ago(a.At), a.Last)
		}
		line("allocator", "this is %s, which only assigns addresses; %s", a.Name, last)
		findings(true, "warning")
		return tw.Flush()
	}
	services := fmt.Sprintf("%d of %d frontends can be announced", i.Healthy, i.Services-i.DrainedServices)
	if i.DrainedServices > 0 {
		services += fmt.Sprintf(", %d drained", i.DrainedServices)
	}
	line("services", "%s", services)
	line("backends", "%d of %d healthy", i.BackendsUp, i.Backends)
	line("routes", "%d of %d announced", i.Announced, i.Routes)
	line("peers", "%d of %d established", i.PeersUp, i.Peers)
	for _, x := range i.Interfaces {
		state := x.Mode + " (" + x.Hook + ")"
		switch {
		case x.Err != "" && x.Mode == "":
			state = x.Err
		case x.Err != "":
			state += "; " + x.Err
		}
		if x.Down {
			state += "; it is down"
		}
		line("interface", "%s: %s", x.Name, state)
	}
	findings(true, "warning")
	return tw.Flush()
}

func yesNo(b bool) string {
	if b {
		return "yes"
	}
	return "no"
}

// ago returns the time since t in one or two units, or "-" for the zero time.
func ago(t time.Time) string {
	if t.IsZero() {
		return "-"
	}
	switch d := time.Since(t); {
	case d < time.Minute:
		return d.Truncate(time.Second).String()
	case d < 48*time.Hour:
		return strings.TrimSuffix(d.Truncate(time.Minute).String(), "0s")
	default:
		return fmt.Sprintf("%dd", int(d.Hours()/24))
	}
}
