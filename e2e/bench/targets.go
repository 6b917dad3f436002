package main

import (
	"fmt"
	"math"
	"strings"
	"time"

	"github.com/steelyard-lb/steelyard/e2e/bench/connections"
	"github.com/steelyard-lb/steelyard/e2e/bench/packets"
	"github.com/steelyard-lb/steelyard/e2e/bench/scale"
)

// target is a limit for a measured value, which is NaN if it was not measured.
type target struct {
	what     string
	limit    float64
	unit     string
	least    bool // limit is a minimum; otherwise a maximum
	measured float64
}

func (t target) met() bool {
	if t.least {
		return t.measured >= t.limit
	}
	return t.measured <= t.limit
}

var stateless = []string{"ipip", "gue", "dsr", "spread"}

// targets compares the results with their targets.
func (r result) targets() []target {
	const (
		nat, reply        = "nat", "nat, reply"
		one, k64, m1, syn = "1 flow", "64k flows", "1M flows", "new SYN"
		insert            = "floor with an insert in an LRU table"
	)
	foreign := []string{"foreign in, XDP", "foreign in, tc", "foreign out, tc"}
	ways := []string{"Steelyard ipip", "Steelyard gue", "Steelyard dsr"}
	big := r.running(10_000)
	return []target{
		{"ipip, gue, dsr, spread, 1 flow", 1.6, "× floor", false, r.worstFloor(stateless, one)},
		{"the same, 64k flows", 2.5, "× floor", false, r.worstFloor(stateless, k64)},
		{"the same, 1M flows", 3, "× floor", false, r.worstFloor(stateless, m1)},
		{"ipip and spread with 10,000 services, to one service", 1.5, "×", false, math.Max(
			r.cost("ipip, 10,000 services", k64)/r.cost("ipip", k64),
			r.cost("spread, 10,000 services", k64)/r.cost("spread", k64))},
		{"a packet that is not ours, in or out", 1, "× floor", false,
			math.Max(r.worstFloor(foreign, one), math.Max(r.worstFloor(foreign, k64), r.worstFloor(foreign, m1)))},
		{"new SYN by ipip, gue, dsr, spread, to a known flow of 64k", 1.2, "×", false,
			worst(stateless, func(p string) float64 { return r.cost(p, syn) / r.cost(p, k64) })},
		{"nat, 1 flow", 2.2, "× floor", false, r.worstFloor([]string{nat}, one)},
		{"nat, 64k flows", 6, "× floor", false, r.worstFloor([]string{nat}, k64)},
		{"nat, 1M flows", 8, "× floor", false, r.worstFloor([]string{nat}, m1)},
		{"reply by nat, to a packet of the client, 64k flows", 1, "×", false, r.cost(reply, k64) / r.cost(nat, k64)},
		{"new SYN by nat", 1.2, "× LRU insert", false, r.cost("nat, no established flows", syn) / r.cost(insert, syn)},
		{"new SYN by nat, ports exhausted", 1.2, "× LRU insert", false,
			r.cost("nat, ports exhausted", syn) / r.cost(insert, syn)},
		{"packets/s to pods, XDP and tc, 32k flows", 2, "× nftables DNAT", true,
			r.rate("Steelyard to pods, XDP and tc", "32k flows")},
		{"packets/s by ipip, gue, dsr, 32k flows", 0.9, "× XDP_TX", true,
			-worst(ways, func(w string) float64 { return -r.rate(w, "32k flows") })},
		{"rate of other packets during a trace of 10,000 packets/s", 0.9, "× no trace", true, r.tracedRatio()},
		{"of these packets, traced", 100, "%", true, r.tracedShare()},
		{"new connections/s by nat, one backend, sustained", 1, "× nftables DNAT", true,
			r.sustained("Steelyard nat, tc") / r.sustained("nftables DNAT")},
		{"the same", 1, "× HAProxy", true, r.sustained("Steelyard nat, tc") / r.sustained("HAProxy")},
		{"connects within 0.3 s by nat, one backend, at 400/s", 100, "%", true,
			100 * r.connections("Steelyard nat, tc", connections.Quick)},
		{"a change with 10,000 services in the datapath, p99", 10, "ms", false, r.change().p99},
		{"the same, CPU", 5, "ms", false, r.change().cpu},
		{"idle with 10,000 services, of one CPU", 1, "%", false, 100 * big.Idle},
		{"resident memory with 10,000 services", 150, "MB", false, float64(big.Resident) / 1e6},
		{"start with 10,000 services until in force", 5, "s", false, big.Start.Seconds()},
	}
}

// worst returns the largest value, or NaN if any is NaN.
func worst(names []string, value func(string) float64) float64 {
	most := math.Inf(-1)
	for _, n := range names {
		most = math.Max(most, value(n))
	}
	return most
}

func (r result) cell(path, load string) packets.Cell {
	for _, c := range r.Cost {
		if c.Path == path && c.Load == load {
			return c
		}
	}
	return packets.Cell{Min: math.NaN(), TimesFloor: math.NaN()}
}

func (r result) cost(path, load string) float64 { return r.cell(path, load).Min }

func (r result) worstFloor(paths []string, load string) float64 {
	return worst(paths, func(p string) float64 { return r.cell(p, load).TimesFloor })
}

func (r result) rate(way, load string) float64 {
	for _, x := range r.Live {
		if x.Way == way && x.Load == load {
			return x.Ratio
		}
	}
	return math.NaN()
}

// tracedRatio returns the worst ratio of the hooks.
func (r result) tracedRatio() float64 {
	worst := math.NaN()
	for _, x := range r.Traced {
		if !(x.Ratio >= worst) {
			worst = x.Ratio
		}
	}
	return worst
}

// tracedShare returns the share of the packets that were traced, in percent.
func (r result) tracedShare() float64 {
	var sent, traced float64
	for _, x := range r.Traced {
		sent, traced = sent+float64(x.Sent), traced+float64(x.Traced)
	}
	return 100 * traced / sent
}

func (r result) sustained(way string) float64 { return r.connections(way, connections.Sustained) }

func (r result) connections(way, kind string) float64 {
	for _, x := range r.Conns {
		if x.Way == way && x.Kind == kind {
			return x.Value
		}
	}
	return math.NaN()
}

// change returns the worse result of the two sizes with 10,000 services, in milliseconds.
func (r result) change() (c struct{ p99, cpu float64 }) {
	c.p99, c.cpu = math.NaN(), math.NaN()
	for _, a := range r.Apply {
		if !strings.HasPrefix(a.Size, "10,000 services") {
			continue
		}
		toMS := func(d time.Duration) float64 { return float64(d) / float64(time.Millisecond) }
		if p99 := toMS(a.P99); !(p99 <= c.p99) {
			c.p99 = p99
		}
		if cpu := toMS(a.CPU); !(cpu <= c.cpu) {
			c.cpu = cpu
		}
	}
	return c
}

func (r result) running(services int) scale.Running {
	for _, a := range r.Agent {
		if a.Services == services {
			return a
		}
	}
	return scale.Running{}
}

// targetTable lists the targets that were measured.
func (r result) targetTable() table {
	t := table{title: "Targets", head: []string{"what", "target", "measured", ""}}
	for _, x := range r.targets() {
		if math.IsNaN(x.measured) || x.measured == 0 {
			continue
		}
		sign, verdict := "≤", "met"
		if x.least {
			sign = "≥"
		}
		if !x.met() {
			verdict = fmt.Sprintf("missed by a factor of %.1f", math.Max(x.measured/x.limit, x.limit/x.measured))
		}
		t.rows = append(t.rows, []string{x.what, fmt.Sprintf("%s %g %s", sign, x.limit, x.unit),
			fmt.Sprintf("%.2f", x.measured), verdict})
	}
	return t
}
