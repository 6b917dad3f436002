package main

import (
	"fmt"
	"io"
	"slices"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/steelyard-lb/steelyard/e2e/bench/connections"
	"github.com/steelyard-lb/steelyard/e2e/bench/packets"
	"github.com/steelyard-lb/steelyard/e2e/bench/scale"
)

// table is a table of results.
type table struct {
	title string
	head  []string
	rows  [][]string
}

// tables returns the tables of what was measured.
func (r result) tables() (all []table) {
	if len(r.Cost) != 0 {
		all = append(all, costTable(r.Cost))
	}
	if len(r.Live) != 0 {
		all = append(all, liveTable(r.Live))
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
	return all
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

// none is the cell of what was not measured.
const none = "–"

// grid makes a table with a row for each name and a column for each load. Names are in the order of the results.
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
	return grid("ns per packet without the wrapper (× the floor with the same load)", "path", packets.Loads, cells,
		func(c packets.Cell) (string, string) { return c.Path, c.Load },
		func(c packets.Cell) string { return fmt.Sprintf("%.0f (%.1f)", c.Min, c.TimesFloor) })
}

func liveTable(rates []packets.Rate) table {
	return grid("thousand packets/s (ratio to the first way of the same kind: median, lowest–highest)", "way",
		packets.LiveLoads, rates,
		func(r packets.Rate) (string, string) { return r.Way, r.Load },
		func(r packets.Rate) string {
			return fmt.Sprintf("%.0f (%.2f, %.2f–%.2f)", r.PerSecond/1000, r.Ratio, r.Low, r.High)
		})
}

func connectionsTable(all []connections.Result) table {
	return grid("HTTP (ratio to plain routing: median, lowest–highest)", "way", connections.Kinds, all,
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
			}
			return fmt.Sprintf("%s (%.2f, %.2f–%.2f)", value, r.Ratio, r.Low, r.High)
		})
}

func applyTable(all []scale.Applied) table {
	t := table{title: "the datapath alone", head: []string{"size", "all in the kernel after", "one change, p50", "p99",
		"CPU for a change", "memory of maps"}}
	for _, a := range all {
		t.rows = append(t.rows, []string{a.Size, ms(a.First), ms(a.P50), ms(a.P99), ms(a.CPU), mib(a.KernelMemory)})
	}
	return t
}

func agentTable(all []scale.Running) table {
	t := table{title: "an agent with a configuration file of 10 backends a service", head: []string{"services",
		"in force after start", "SIGHUP until in force, p50", "p99", "CPU for a reload", "idle, of one CPU", "resident",
		"memory of maps"}}
	for _, r := range all {
		t.rows = append(t.rows, []string{fmt.Sprint(r.Services), ms(r.Start), ms(r.P50), ms(r.P99), ms(r.CPU),
			fmt.Sprintf("%.1f %%", 100*r.Idle), mib(r.Resident), mib(r.KernelMemory)})
	}
	return t
}

func ms(d time.Duration) string { return fmt.Sprintf("%.1f ms", float64(d)/float64(time.Millisecond)) }

func mib(bytes uint64) string { return fmt.Sprintf("%.1f MiB", float64(bytes)/(1<<20)) }
