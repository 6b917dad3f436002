// Bench measures Steelyard: the cost of a packet, the rates of packets and connections compared with other ways to
// forward them, and how costs grow with size. It needs root. Compare only ratios from one run on an otherwise idle
// machine.
package main

import (
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"os"
	"regexp"
	"slices"
	"strings"
	"time"

	"github.com/steelyard-lb/steelyard/e2e/bench/cluster"
	"github.com/steelyard-lb/steelyard/e2e/bench/connections"
	"github.com/steelyard-lb/steelyard/e2e/bench/convergence"
	"github.com/steelyard-lb/steelyard/e2e/bench/packets"
	"github.com/steelyard-lb/steelyard/e2e/bench/scale"
)

func main() {
	if err := run(); err != nil {
		fmt.Fprintln(os.Stderr, "bench:", err)
		os.Exit(1)
	}
}

// parts are the values of -only.
var parts = []string{"cost", "live", "trace", "connections", "scale", "convergence", "cluster"}

// result has everything that was measured.
type result struct {
	Machine string               `json:"machine"`
	Cost    []packets.Cell       `json:"cost,omitempty"`
	Live    []packets.Rate       `json:"live,omitempty"`
	Traced  []packets.Traced     `json:"traced,omitempty"`
	Conns   []connections.Result `json:"connections,omitempty"`
	Apply   []scale.Applied      `json:"apply,omitempty"`
	Agent   []scale.Running      `json:"agent,omitempty"`
	Gone    []convergence.Result `json:"convergence,omitempty"`
	Cluster []cluster.Result     `json:"cluster,omitempty"`
}

func run() error {
	only := flag.String("only", strings.Join(parts[:len(parts)-1], ","), "`parts` to run; also: cluster")
	cost := packets.CostOptions{Log: os.Stderr}
	rows := flag.String("rows", ".", "cost: regular expression of the `paths` to measure")
	flag.IntVar(&cost.Flows, "flows", 1<<20, "cost: open flows, a power of two; 65536 makes a short run")
	flag.IntVar(&cost.Packets, "packets", 50_000, "cost: packets in a round")
	flag.IntVar(&cost.Rounds, "rounds", 15, "cost: rounds")
	live := packets.LiveOptions{Packets: 100_000, Log: os.Stderr}
	flag.IntVar(&live.Rounds, "liverounds", 10, "live, trace: rounds")
	conns := connections.Options{Log: os.Stderr}
	flag.IntVar(&conns.Rounds, "connrounds", 6, "connections: rounds")
	ways := flag.String("ways", ".", "connections: regular expression of the `ways` to measure")
	flag.DurationVar(&conns.Sustained, "sustained", time.Minute, "connections: duration of tests with one backend")
	rounds := flag.Int("convrounds", 5, "convergence: rounds")
	large := cluster.Options{Log: os.Stderr}
	flag.IntVar(&large.Nodes, "nodes", 1000, "cluster: nodes")
	flag.IntVar(&large.Services, "services", 5000, "cluster: services")
	flag.IntVar(&large.Endpoints, "endpoints", 10, "cluster: endpoints of a service")
	flag.IntVar(&large.Changes, "changes", 200, "cluster: changed endpoints")
	flag.IntVar(&large.Restarts, "restarts", 5, "cluster: restarts of each program")
	flag.StringVar(&large.ControlPlane, "controlplane", ".cache/controlplane",
		"connections, cluster: `directory` of Kubernetes' programs")
	binary := flag.String("binary", "./steelyard", "connections, scale, convergence, cluster: `path` of the program")
	file := flag.String("json", "", "write the results to this `file`")
	page := flag.String("page", "", "write the tables to this `file`, as Markdown")
	size := flag.Int("size", -1, "measure the datapath with services of this `index`, in this network: part of scale")
	from := flag.String("from", "", "read the results from `files` that -json wrote, and measure nothing")
	flag.Parse()
	if *size >= 0 {
		return scale.ApplyHere(*size, os.Stdout)
	}
	var err error
	if cost.Rows, err = regexp.Compile(*rows); err != nil {
		return fmt.Errorf("-rows: %w", err)
	}
	if conns.Ways, err = regexp.Compile(*ways); err != nil {
		return fmt.Errorf("-ways: %w", err)
	}
	var r result
	if *from != "" {
		r, err = readResults(strings.Split(*from, ","))
	} else {
		r, err = measure(strings.Split(*only, ","), cost, live, conns, large, *rounds, *binary)
	}
	if err != nil {
		return errors.Join(err, r.print(os.Stdout))
	}
	if err := r.print(os.Stdout); err != nil {
		return err
	}
	return r.write(*file, *page)
}

// measure runs the chosen parts. On error, it also returns the previous parts' results.
func measure(
	chosen []string, cost packets.CostOptions, live packets.LiveOptions, conns connections.Options,
	large cluster.Options, rounds int, binary string,
) (r result, err error) {
	for _, part := range chosen {
		if !slices.Contains(parts, part) {
			return r, fmt.Errorf("-only: unknown part %q; parts are %s", part, strings.Join(parts, ", "))
		}
	}
	if r.Machine, err = machine(); err != nil {
		return r, err
	}
	for _, part := range chosen {
		switch part {
		case "cost":
			r.Cost, err = packets.Cost(cost)
		case "live":
			r.Live, err = packets.Live(live)
		case "trace":
			r.Traced, err = packets.Trace(live)
		case "connections":
			conns.Binary, conns.ControlPlane = binary, large.ControlPlane
			r.Conns, err = connections.Run(conns)
		case "scale":
			if r.Apply, err = scale.Apply("/proc/self/exe", "-size=", os.Stderr); err == nil {
				r.Agent, err = scale.Agent(binary, os.Stderr)
			}
		case "convergence":
			r.Gone, err = convergence.Run(binary, rounds, os.Stderr)
		case "cluster":
			large.Binary = binary
			var one cluster.Result
			one, err = cluster.Run(large)
			r.Cluster = append(r.Cluster, one)
		}
		if err != nil {
			return r, fmt.Errorf("%s: %w", part, err)
		}
	}
	return r, nil
}

// readResults reads files with different parts.
func readResults(files []string) (r result, err error) {
	for _, path := range files {
		text, err := os.ReadFile(path)
		if err != nil {
			return r, err
		}
		if err := json.Unmarshal(text, &r); err != nil {
			return r, fmt.Errorf("%s: %w", path, err)
		}
	}
	return r, nil
}

// write writes the results to file and the page to page, unless these are "".
func (r result) write(file, page string) error {
	if file != "" {
		text, err := json.MarshalIndent(r, "", "\t")
		if err != nil {
			return err
		}
		if err := os.WriteFile(file, append(text, '\n'), 0o644); err != nil {
			return err
		}
	}
	if page == "" {
		return nil
	}
	return os.WriteFile(page, []byte(r.page()), 0o644)
}
