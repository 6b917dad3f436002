package cli

import (
	"bytes"
	"cmp"
	"context"
	"fmt"
	"io"
	"math"
	"os"
	"slices"
	"strings"
	"text/tabwriter"
	"time"

	ucli "github.com/urfave/cli/v2"

	"github.com/steelyard-lb/steelyard/lb"
	"github.com/steelyard-lb/steelyard/lb/admin"
	"github.com/steelyard-lb/steelyard/lb/printable"
)

// topRow is a service's frontend or a backend.
type topRow struct {
	topKey
	state string
	lb.Traffic
	// Of a frontend: the longest of its backends.
	probes    lb.ProbeTimes
	handshake float64
}

type topKey struct{ service, address string }

// figuresWidth is the number of columns of a terminal that a row takes besides service and address. The handshakes, its
// last cell, are left out if it would not fit.
const (
	figuresWidth   = 60 + handshakeWidth
	handshakeWidth = len("  HANDSHAKE")
	narrowest      = 20 // of service and address
)

// topOrder is a value of --sort. It puts the rows first that matter most, and their column.
type topOrder struct {
	name    string
	column  int
	compare func(a, b topRow) int
}

var topOrders = []topOrder{
	{"service", 0, func(a, b topRow) int { return 0 }}, // as the agent lists them
	{"new", 3, func(a, b topRow) int { return cmp.Compare(b.FlowRate, a.FlowRate) }},
	{"packets", 4, func(a, b topRow) int { return cmp.Compare(b.PacketRate, a.PacketRate) }},
	{"bits", 5, func(a, b topRow) int { return cmp.Compare(b.BitRate, a.BitRate) }},
	{"last", 6, func(a, b topRow) int { return b.Traffic.Last.Compare(a.Traffic.Last) }},
	{"probe", 7, func(a, b topRow) int { return cmp.Compare(b.probes.Last, a.probes.Last) }},
	{"p95", 8, func(a, b topRow) int { return cmp.Compare(b.probes.P95, a.probes.P95) }},
	{"handshake", 9, func(a, b topRow) int { return cmp.Compare(b.handshake, a.handshake) }},
}

// top returns a command that prints the figures of services and backends repeatedly.
func (e *env) top() *ucli.Command {
	var orders []string
	for _, o := range topOrders {
		orders = append(orders, o.name)
	}
	return &ucli.Command{
		Name: "top", Usage: "print the traffic of services and servers repeatedly; end it with q",
		Flags: []ucli.Flag{
			&ucli.StringFlag{Name: "sort", Value: "bits", Usage: "sort by `COLUMN`: " + strings.Join(orders, ", ")},
			&ucli.DurationFlag{Name: "interval", Value: 2 * time.Second, Usage: "print every `DURATION`"},
			&ucli.IntFlag{
				Name: "n", Usage: "print `N` times, one below the other",
				DefaultText: "until q, or once if the output is not a terminal",
			},
			socketFlag(),
		},
		Action: func(c *ucli.Context) error {
			t := topView{agent: admin.NewClient(c.String("socket"))}
			interval, n, order := c.Duration("interval"), c.Int("n"), slices.Index(orders, c.String("sort"))
			switch {
			case order < 0:
				return fmt.Errorf("%w: --sort %s: allowed: %s", errUsage, c.String("sort"), strings.Join(orders, ", "))
			case interval < 100*time.Millisecond:
				return fmt.Errorf("%w: --interval %s: want at least 100ms", errUsage, interval)
			case n < 0:
				return fmt.Errorf("%w: -n %d: want 1 or more", errUsage, n)
			}
			t.order = topOrders[order]
			if n > 0 || e.terminal == nil {
				return t.repeat(c.Context, interval, max(n, 1), func(text string) error {
					_, err := io.WriteString(e.out, e.painted(text))
					return err
				})
			}
			t.size = func() (rows, columns int) { return size(e.terminal) }
			return e.fullScreen(c.Context, func(ctx context.Context, draw func(string) error) error {
				return t.repeat(ctx, interval, -1, draw)
			})
		},
	}
}

// fullScreen lets f draw on the terminal until ctx ends or somebody presses q.
func (e *env) fullScreen(ctx context.Context, f func(context.Context, func(string) error) error) error {
	restore, err := keysAtOnce(e.terminal)
	if err != nil {
		return err
	}
	defer restore()
	ctx, stop := context.WithCancel(ctx)
	defer stop()
	go func() { // a terminal is also open for reading
		key := make([]byte, 1)
		for key[0] != 'q' {
			if n, err := e.terminal.Read(key); n == 0 || err != nil {
				return // Ctrl-C still ends it
			}
		}
		stop()
	}()
	const alternate, normal = "\x1b[?1049h\x1b[?25l", "\x1b[?25h\x1b[?1049l" // screens, without and with the cursor
	io.WriteString(e.terminal, alternate)
	defer io.WriteString(e.terminal, normal)
	return f(ctx, func(text string) error {
		_, err := io.WriteString(e.terminal, "\x1b[H"+e.painted(fit(e.terminal, text))+"\x1b[J")
		return err
	})
}

// fit cuts a text to the size of a terminal, and clears the rest of each line.
func fit(terminal *os.File, text string) string {
	height, width := size(terminal)
	lines := strings.Split(strings.TrimSuffix(text, "\n"), "\n")
	lines = lines[:min(len(lines), height-1)]
	for i, line := range lines {
		if r := []rune(line); len(r) > width {
			lines[i] = string(r[:width])
		}
	}
	return strings.Join(lines, "\x1b[K\n") + "\x1b[K\n"
}

// topView reads the figures and prints them.
type topView struct {
	agent *admin.Client
	order topOrder
	size  func() (rows, columns int) // of the terminal, or nil if there is no limit
	was   map[topKey]lb.Traffic      // of the previous text
}

// repeat writes the figures n times, or until ctx ends if n is negative. Then an agent that restarts does not end it:
// the previous figures stay, below the error.
func (t *topView) repeat(ctx context.Context, interval time.Duration, n int, write func(string) error) error {
	last := ""
	for i := 0; ; i++ {
		text, err := t.text(ctx)
		switch {
		case ctx.Err() != nil:
			return nil
		case err == nil:
			last = text
			err = write(text)
		case n < 0 && last != "":
			err = write(printable.Text(err.Error()) + "\n" + last)
		}
		if err != nil || i+1 == n {
			return err
		}
		select {
		case <-ctx.Done():
			return nil
		case <-time.After(interval):
		}
	}
}

// text returns the figures. The first time, rates are the agent's averages, and later those since the previous time.
func (t *topView) text(ctx context.Context) (string, error) {
	var i admin.Info
	var services []lb.ServiceStatus
	var backends []lb.BackendStatus
	for path, to := range map[string]any{"/v1/status": &i, "/v1/services": &services, "/v1/backends": &backends} {
		if err := t.agent.Get(ctx, path, to); err != nil {
			return "", err
		}
	}
	var out bytes.Buffer
	fmt.Fprintf(&out, "%s\n%s, %s\n\n", printable.Text(i.Headline()), printable.Text(i.Node),
		time.Now().Format(time.TimeOnly))
	var all [2][]topRow
	for _, s := range services {
		x := topRow{topKey: topKey{s.Service, frontendOf(s)}, state: healthyOf(s), Traffic: s.Traffic}
		for _, b := range s.Backends {
			x.probes.Last, x.probes.P95 = max(x.probes.Last, b.ProbeTimes.Last), max(x.probes.P95, b.P95)
			x.handshake = max(x.handshake, b.Handshake95)
		}
		all[0] = append(all[0], x)
	}
	for _, b := range backends {
		all[1] = append(all[1], topRow{
			topKey: topKey{b.Service, backendOf(b)}, state: b.State.String(), Traffic: b.Traffic, probes: b.ProbeTimes,
			handshake: b.Handshake95,
		})
	}
	t.sinceLast(all[:])
	for i, header := range [][]any{{"SERVICE", "ADDRESS", "HEALTHY"}, {"SERVICE", "BACKEND", "STATE"}} {
		rows := all[i]
		slices.SortStableFunc(rows, t.order.compare)
		more, columns := 0, math.MaxInt
		if t.size != nil { // the second table gets the lines that the first one leaves
			var height int
			height, columns = t.size()
			left := (height - strings.Count(out.String(), "\n") - 4 + i) >> (1 - i)
			if shown := max(0, left-1); len(rows) > left {
				rows, more = rows[:shown], len(rows)-shown
			}
		}
		if i > 0 {
			fmt.Fprintln(&out)
		}
		width, shown := figuresWidth, 10
		if columns < figuresWidth+narrowest && t.order.column < shown-1 {
			width, shown = width-handshakeWidth, shown-1
		}
		service := max(6, (columns-width)/3)
		address := max(14, columns-width-service)
		tw := tabwriter.NewWriter(&out, 0, 0, 2, ' ', 0)
		t.write(tw, append(header, "NEW/S", "PKTS/S", "BITS/S", "LAST", "PROBE", "P95", "HANDSHAKE")[:shown])
		for _, r := range rows {
			names := []any{ending(r.service, service), ending(r.address, address), r.state}
			cells := append(append(names, figures(r.Traffic)...), seconds(r.probes.Last), seconds(r.probes.P95),
				seconds(r.handshake))
			t.write(tw, cells[:shown])
		}
		tw.Flush()
		if more > 0 {
			fmt.Fprintf(&out, "… and %d more\n", more)
		}
	}
	return out.String(), nil
}

// write writes a row. The column of the order comes first, where even a narrow terminal shows it.
func (t *topView) write(w io.Writer, cells []any) {
	i := t.order.column
	writeRow(w, slices.Insert(slices.Delete(slices.Clone(cells), i, i+1), 0, cells[i])...)
}

// ending cuts a text to n characters and keeps its end, which tells names and addresses apart.
func ending(s string, n int) string {
	if r := []rune(s); len(r) > n {
		return "…" + string(r[len(r)-n+1:])
	}
	return s
}

// sinceLast replaces the averages in the rows by the rates since the previous text. If the agent has not read the
// counters since then, the rates stay. The first call keeps the averages.
func (t *topView) sinceLast(tables [][]topRow) {
	next := map[topKey]lb.Traffic{}
	for _, rows := range tables {
		for i := range rows {
			r := &rows[i]
			if was, known := t.was[r.topKey]; known && !r.Since(was) && r.Read.Equal(was.Read) {
				r.Traffic = was
			}
			next[r.topKey] = r.Traffic
		}
	}
	t.was = next
}
