package main

import (
	"fmt"
	"io"
	"maps"
	"slices"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/steelyard-lb/steelyard/e2e/bench/cluster"
	"github.com/steelyard-lb/steelyard/e2e/bench/connections"
	"github.com/steelyard-lb/steelyard/e2e/bench/convergence"
	"github.com/steelyard-lb/steelyard/e2e/bench/packets"
	"github.com/steelyard-lb/steelyard/e2e/bench/scale"
)

type table struct {
	title string
	head  []string
	rows  [][]string
}

// tables returns the tables of all results.
func (r result) tables() (all []table) {
	if len(r.Cost) != 0 {
		all = append(all, costTable(r.Cost))
	}
	if len(r.Live) != 0 {
		all = append(all, liveTable(r.Live))
	}
	if len(r.Traced) != 0 {
		all = append(all, tracedTable(r.Traced))
	}
	if len(r.Conns) != 0 {
		all = append(all, connectionsTable(r.Conns))
	}
	if len(r.Apply) != 0 {
		all = append(all, applyTable(r.Apply))
	}
	if len(r.Agent) != 0 {
		all = append(all, agentTable(r.Agent))
	}
	if len(r.Gone) != 0 {
		all = append(all, convergenceTable(r.Gone))
	}
	for _, c := range r.Cluster {
		all = append(all, clusterTable(c), requestsTable(c))
	}
	return append(all, r.targetTable())
}

// print writes the tables as text.
func (r result) print(out io.Writer) error {
	fmt.Fprintln(out, r.Machine)
	for _, t := range r.tables() {
		w := tabwriter.NewWriter(out, 0, 0, 2, ' ', 0)
		fmt.Fprintf(w, "\n%s\n%s\n", t.title, strings.Join(t.head, "\t"))
		for _, row := range t.rows {
			fmt.Fprintln(w, strings.Join(row, "\t"))
		}
		if err := w.Flush(); err != nil {
			return err
		}
	}
	return nil
}

// none is the cell of a value that was not measured.
const none = "–"

// grid returns a table with one row per name and one column per load. Names are in the order of the results.
func grid[T any](title, what string, loads []string, results []T, key func(T) (name, load string),
	cell func(T) string) table {
	t := table{title: title, head: append([]string{what}, loads...)}
	index := map[string]int{}
	for _, r := range results {
		name, load := key(r)
		i, ok := index[name]
		if !ok {
			i = len(t.rows)
			index[name] = i
			t.rows = append(t.rows, append([]string{name}, slices.Repeat([]string{none}, len(loads))...))
		}
		t.rows[i][1+slices.Index(loads, load)] = cell(r)
	}
	return t
}

func costTable(cells []packets.Cell) table {
	return grid("Cost: ns per packet (× the floor with the same load)", "path", packets.Loads, cells,
		func(c packets.Cell) (string, string) { return c.Path, c.Load },
		func(c packets.Cell) string { return fmt.Sprintf("%.0f (%.1f)", c.Min, c.TimesFloor) })
}

func liveTable(rates []packets.Rate) table {
	return grid("Packet rates: 1000 packets/s (ratio to XDP_TX or nftables to pods: median, lowest–highest)", "way",
		packets.LiveLoads, rates,
		func(r packets.Rate) (string, string) { return r.Way, r.Load },
		func(r packets.Rate) string {
			return fmt.Sprintf("%.0f (%.2f, %.2f–%.2f)", r.PerSecond/1000, r.Ratio, r.Low, r.High)
		})
}

func tracedTable(all []packets.Traced) table {
	t := table{
		title: "Trace of 10,000 packets/s by nat: rate of other packets (ratio to no trace: median, lowest–highest)",
		head:  []string{"hook", "ratio", "traced", "sent"},
	}
	for _, x := range all {
		t.rows = append(t.rows, []string{x.Hook, fmt.Sprintf("%.2f, %.2f–%.2f", x.Ratio, x.Low, x.High),
			fmt.Sprint(x.Traced), fmt.Sprint(x.Sent)})
	}
	return t
}

func connectionsTable(all []connections.Result) table {
	return grid("Connections: HTTP (ratio to plain routing: median, lowest–highest)", "way", connections.Kinds, all,
		func(r connections.Result) (string, string) { return r.Way, r.Kind },
		func(r connections.Result) string {
			value := fmt.Sprintf("%.0f", r.Value)
			switch r.Kind {
			case connections.Latency:
				value = fmt.Sprintf("%.0f µs", 1e6*r.Value)
			case connections.Throughput:
				value = fmt.Sprintf("%.1f Gbit/s", 8*r.Value/1e9)
			case connections.Sustained:
				return value
			case connections.Quick:
				return fmt.Sprintf("%.2f %%", 100*r.Value)
			}
			return fmt.Sprintf("%s (%.2f, %.2f–%.2f)", value, r.Ratio, r.Low, r.High)
		})
}

func applyTable(all []scale.Applied) table {
	t := table{title: "Growth: the datapath alone", head: []string{
		"size", "all in the kernel after", "one change, p50", "p99", "CPU for a change", "memory of maps",
	}}
	for _, a := range all {
		t.rows = append(t.rows, []string{a.Size, ms(a.First), ms(a.P50), ms(a.P99), ms(a.CPU), mib(a.KernelMemory)})
	}
	return t
}

func agentTable(all []scale.Running) table {
	t := table{title: "Agent: with a configuration file of services with 10 backends", head: []string{
		"services", "in force after start", "SIGHUP until in force, p50", "p99", "CPU for a reload",
		"idle, of one CPU", "resident", "memory of maps",
	}}
	for _, r := range all {
		t.rows = append(t.rows, []string{fmt.Sprint(r.Services), ms(r.Start), ms(r.P50), ms(r.P99), ms(r.CPU),
			fmt.Sprintf("%.1f %%", 100*r.Idle), mib(r.Resident), mib(r.KernelMemory)})
	}
	return t
}

func convergenceTable(all []convergence.Result) table {
	t := table{title: "Convergence: two nodes behind BIRD with BFD of 3 × 100 ms; two failed checks, one each 100 ms",
		head: []string{"event", "median", "lowest–highest", "failed requests in all rounds, one each 10 ms"}}
	for _, r := range all {
		t.rows = append(t.rows, []string{r.Event, ms(r.Median()), ms(r.Times[0]) + "–" + ms(r.Times[len(r.Times)-1]),
			fmt.Sprintf("%d (%d rounds)", r.Failed, len(r.Times))})
	}
	return t
}

func clusterTable(c cluster.Result) table {
	t := table{
		title: fmt.Sprintf("Kubernetes: %d nodes with heartbeats, %d services, %d endpoints", c.Nodes, c.Services,
			c.Endpoints),
		head: []string{"what", "target", "measured"},
	}
	t.rows = [][]string{
		{"every Service has an address, after the start of what assigns", "≤ 60 s", ms(c.Assigned)},
		{"the last Service is in force, after the start of the agent", "–", ms(c.Start)},
		{"endpoint changed until in force, from the answer of the API server, p50", "–", ms(c.Answered50)},
		{"endpoint changed until in force, from the answer of the API server, p99", "≤ 10 ms", ms(c.Answered99)},
		{"the same with the request, p50", "–", ms(c.P50)},
		{"the same with the request, p99", "–", ms(c.P99)},
		{"the request alone, p50", "–", ms(c.Request50)},
		{"the request alone, p99", "–", ms(c.Request99)},
		{"CPU for a changed endpoint", "≤ 5 ms", ms(c.CPU)},
		{"idle, of one CPU", "≤ 1 %", fmt.Sprintf("%.2f %%", 100*c.Idle)},
		{"heartbeats that the API server took at that time, of those due", "–", fmt.Sprintf("%.0f %%", 100*c.Beats)},
		{"resident", "≤ 150 MB", fmt.Sprintf("%.0f MB", float64(c.Resident)/1e6)},
	}
	return t
}

// rollout is the number of nodes in a rolling restart to which requests are extrapolated.
const rollout = 1000

// requestsTable shows the API server requests of one restart and of a rolling restart, which repeats them on each node.
func requestsTable(c cluster.Result) table {
	t := table{title: fmt.Sprintf("Requests to the API server: of one restart, the average of %d, and of a rolling "+
		"restart of %d nodes, extrapolated from that", c.Restarts, rollout)}
	t.head = []string{"request"}
	programs := slices.Sorted(maps.Keys(c.Requests))
	sum := map[string]float64{}
	kinds := map[string]bool{}
	for _, p := range programs {
		t.head = append(t.head, p, fmt.Sprintf("%s × %d", p, rollout))
		for kind, n := range c.Requests[p] {
			kinds[kind] = true
			sum[p] += n
		}
	}
	add := func(what string, of func(program string) float64) {
		row := []string{what}
		for _, p := range programs {
			row = append(row, fmt.Sprintf("%.1f", of(p)), fmt.Sprintf("%.0f", rollout*of(p)))
		}
		t.rows = append(t.rows, row)
	}
	for _, kind := range slices.Sorted(maps.Keys(kinds)) {
		add(kind, func(program string) float64 { return c.Requests[program][kind] })
	}
	add("all", func(program string) float64 { return sum[program] })
	return t
}

func ms(d time.Duration) string { return fmt.Sprintf("%.1f ms", float64(d)/float64(time.Millisecond)) }

func mib(bytes uint64) string { return fmt.Sprintf("%.1f MiB", float64(bytes)/(1<<20)) }

// markdown returns the table in Markdown.
func (t table) markdown() string {
	var b strings.Builder
	title, about, _ := strings.Cut(t.title, ": ")
	fmt.Fprintf(&b, "### %s\n\n", title)
	if about != "" {
		fmt.Fprintf(&b, "%s\n\n", about)
	}
	row := func(cells []string) { fmt.Fprintf(&b, "| %s |\n", strings.Join(cells, " | ")) }
	row(t.head)
	row(slices.Repeat([]string{"---"}, len(t.head)))
	for _, r := range t.rows {
		row(r)
	}
	return b.String()
}

// page returns all tables as Markdown, the targets first.
func (r result) page() string {
	var b strings.Builder
	fmt.Fprintf(&b, "# Measurements\n\n%s.\n", r.Machine)
	tables := r.tables()
	for _, t := range append(tables[len(tables)-1:], tables[:len(tables)-1]...) {
		fmt.Fprintf(&b, "\n%s", t.markdown())
	}
	return b.String()
}
