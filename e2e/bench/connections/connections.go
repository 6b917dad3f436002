// Package connections measures HTTP through a host that forwards in different ways: new connections per second, latency
// and throughput. The client is wrk and the server nginx, which closes first; both run on the forwarding host's CPUs.
// To avoid measuring the servers' tables, they keep no TIME_WAIT state, and connection tracking keeps it for only a
// second. The measurements at a constant rate keep it.
package connections

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os/exec"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/steelyard-lb/steelyard/e2e/lab"
	"github.com/steelyard-lb/steelyard/e2e/lab/kube"
)

// Options are the options of Run.
type Options struct {
	Binary       string // of steelyard
	ControlPlane string // directory of Kubernetes' programs
	Rounds       int
	Ways         *regexp.Regexp // ways to measure, in addition to plain routing
	Sustained    time.Duration  // duration of measurements with one backend
	Log          io.Writer
}

// Kinds of measurements.
const (
	NewConnections = "new connections/s"
	Latency        = "p50 latency, 1 client"
	Throughput     = "throughput"
	Sustained      = "new connections/s, one backend, sustained"
	Quick          = "connects within 0.3 s, one backend, at 400/s"
)

// Kinds are the table's columns.
var Kinds = []string{NewConnections, Latency, Throughput, Sustained, Quick}

// Result is the result of one kind of measurement for one way.
type Result struct {
	Way, Kind string
	// Value is the median of the rounds, in connections per second, seconds, bytes per second, or as a share.
	Value float64
	// Ratio is the median of each round's ratio to plain routing, and Low and High are its extremes.
	Ratio, Low, High float64
}

// loads are wrk's arguments.
var loads = map[string][]string{
	NewConnections: {"-t2", "-c32", "-d2s", "-H", "Connection: close"},
	Latency:        {"-t1", "-c1", "-d1s", "--latency"},
	Throughput:     {"-t1", "-c4", "-d1s"},
}

// Run measures the ways whose programs are installed.
func Run(o Options) (_ []Result, err error) {
	for _, needed := range []string{"wrk", "nginx"} {
		if _, err := exec.LookPath(needed); err != nil {
			return nil, fmt.Errorf("%w; sh e2e/deps.sh bench installs it", err)
		}
	}
	l, err := lab.New()
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, l.Close()) }()
	var sites []*site
	for _, w := range ways {
		if w.name != plain && !o.Ways.MatchString(w.name) {
			continue
		}
		if _, err := exec.LookPath(w.needs); w.needs != "" && err != nil {
			fmt.Fprintf(o.Log, "skipping %s: %v\n", w.name, err)
			continue
		}
		if err := kube.Available(o.ControlPlane); (w.name == kubeProxy || w.name == serviceProxy) && err != nil {
			fmt.Fprintf(o.Log, "skipping %s: %v\n", w.name, err)
			continue
		}
		fmt.Fprintf(o.Log, "prepare %s\n", w.name)
		s, err := newSite(l, w, o)
		if err != nil {
			return nil, fmt.Errorf("%s: %w", w.name, err)
		}
		sites = append(sites, s)
	}
	for round := range o.Rounds {
		fmt.Fprintf(o.Log, "round %d of %d\n", round+1, o.Rounds)
		for _, kind := range []string{NewConnections, Latency, Throughput} {
			for _, s := range sites {
				if err := s.measure(kind, s.way.to, loads[kind]); err != nil {
					return nil, fmt.Errorf("%s, %s: %w", s.way.name, kind, err)
				}
			}
		}
	}
	for _, s := range sites {
		if s.way.one == "" || o.Sustained == 0 {
			continue
		}
		fmt.Fprintf(o.Log, "sustained: %s\n", s.way.name)
		args := []string{"-t2", "-c32", fmt.Sprintf("-d%ds", int(o.Sustained.Seconds())), "-H", "Connection: close"}
		if err := s.measure(Sustained, s.way.one, args); err != nil {
			return nil, fmt.Errorf("%s, %s: %w", s.way.name, Sustained, err)
		}
		if err := s.paced(o.Sustained); err != nil {
			return nil, fmt.Errorf("%s, %s: %w", s.way.name, Quick, err)
		}
	}
	return results(sites), nil
}

var (
	requestsPerSecond = regexp.MustCompile(`Requests/sec:\s+([0-9.]+)`)
	bytesPerSecond    = regexp.MustCompile(`Transfer/sec:\s+([0-9.]+)([KMG]?)B`)
	halfOfRequests    = regexp.MustCompile(`50%\s+([0-9.]+[a-z]+)`)
)

// measure runs wrk and records the value.
func (s *site) measure(kind, to string, args []string) error {
	url := "http://" + to + "/"
	if kind == Throughput {
		url += "big"
	}
	ctx, cancel := context.WithTimeout(context.Background(), 3*time.Minute)
	defer cancel()
	out, err := s.client.Run(ctx, "wrk", append(slices.Clone(args), url)...)
	if err != nil {
		return err
	}
	value := 0.0
	switch kind {
	case Latency:
		if m := halfOfRequests.FindStringSubmatch(out); m != nil {
			d, err := time.ParseDuration(m[1])
			if err != nil {
				return err
			}
			value = d.Seconds()
		}
	case Throughput:
		if m := bytesPerSecond.FindStringSubmatch(out); m != nil {
			value, _ = strconv.ParseFloat(m[1], 64)
			value *= map[string]float64{"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}[m[2]]
		}
	default:
		if m := requestsPerSecond.FindStringSubmatch(out); m != nil {
			value, _ = strconv.ParseFloat(m[1], 64)
		}
	}
	if value == 0 || strings.Contains(out, "Non-2xx") {
		return fmt.Errorf("unexpected output of wrk:\n%s", out)
	}
	s.values[kind] = append(s.values[kind], value)
	return nil
}

func results(sites []*site) (all []Result) {
	base := sites[0]
	for _, s := range sites {
		for _, kind := range Kinds {
			values := s.values[kind]
			if len(values) == 0 {
				continue
			}
			r := Result{Way: s.way.name, Kind: kind, Value: median(values)}
			if of := base.values[kind]; len(of) == len(values) {
				var ratios []float64
				for i := range values {
					ratios = append(ratios, values[i]/of[i])
				}
				r.Ratio, r.Low, r.High = median(ratios), slices.Min(ratios), slices.Max(ratios)
			}
			all = append(all, r)
		}
	}
	return all
}

func median(x []float64) float64 {
	x = slices.Sorted(slices.Values(x))
	return (x[(len(x)-1)/2] + x[len(x)/2]) / 2
}
