// Bench measures the datapath: what a packet costs, what passes through it beside other load balancers, and how it
// grows. It needs root. Measure on an idle machine, and compare ratios of one run only.
package main

import (
	"encoding/json"
	"flag"
	"fmt"
	"io"
	"os"
	"regexp"
	"slices"
	"strings"
	"text/tabwriter"

	"github.com/steelyard-lb/steelyard/e2e/bench/cost"
)

func main() {
	if err := run(); err != nil {
		fmt.Fprintln(os.Stderr, "bench:", err)
		os.Exit(1)
	}
}

// parts are the names for -only.
var parts = []string{"cost"}

// result is everything that was measured.
type result struct {
	Cost []cost.Cell `json:"cost,omitempty"`
}

func run() error {
	only := flag.String("only", strings.Join(parts, ","), "`parts` to run")
	rows := flag.String("rows", ".", "cost: regular expression of the `paths` to measure")
	flows := flag.Int("flows", 1<<20, "cost: open flows, a power of two; a small number makes a short run")
	packets := flag.Int("packets", 50_000, "cost: packets in a round")
	rounds := flag.Int("rounds", 9, "cost: rounds")
	out := flag.String("json", "", "write the results to this `file`")
	flag.Parse()
	re, err := regexp.Compile(*rows)
	if err != nil {
		return fmt.Errorf("-rows: %w", err)
	}
	var r result
	for _, part := range strings.Split(*only, ",") {
		if !slices.Contains(parts, part) {
			return fmt.Errorf("-only: unknown part %q; parts are %s", part, strings.Join(parts, ", "))
		}
	}
	r.Cost, err = cost.Run(cost.Options{Rows: re, Flows: *flows, Packets: *packets, Rounds: *rounds, Log: os.Stderr})
	if err != nil {
		return err
	}
	if err := printCost(os.Stdout, r.Cost); err != nil || *out == "" {
		return err
	}
	text, err := json.MarshalIndent(r, "", "\t")
	if err != nil {
		return err
	}
	return os.WriteFile(*out, append(text, '\n'), 0o644)
}

// printCost prints a row for each path with a column for each load: the minimum in nanoseconds, and that as a multiple
// of the floor with the same load.
func printCost(out io.Writer, cells []cost.Cell) error {
	w := tabwriter.NewWriter(out, 0, 0, 2, ' ', 0)
	fmt.Fprintf(w, "ns per packet (× floor)\t%s\n", strings.Join(cost.Loads, "\t"))
	var names []string
	for _, c := range cells {
		if !slices.Contains(names, c.Path) {
			names = append(names, c.Path)
		}
	}
	for _, name := range names {
		fmt.Fprint(w, name)
		for _, load := range cost.Loads {
			i := slices.IndexFunc(cells, func(c cost.Cell) bool { return c.Path == name && c.Load == load })
			if i < 0 {
				fmt.Fprint(w, "\t–")
				continue
			}
			fmt.Fprintf(w, "\t%.0f (%.1f)", cells[i].Min, cells[i].TimesFloor)
		}
		fmt.Fprintln(w)
	}
	return w.Flush()
}
