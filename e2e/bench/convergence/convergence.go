// Package convergence measures how long a router still uses a node after a failure. Two load balancers with one VIP are
// behind BIRD, with BFD at 3 × 100 ms and checks every 100 ms, two of which must fail.
package convergence

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/netip"
	"slices"
	"syscall"
	"time"

	"github.com/steelyard-lb/steelyard/e2e/lab"
	"github.com/steelyard-lb/steelyard/e2e/lab/peers"
	"github.com/steelyard-lb/steelyard/e2e/lab/traffic"
)

// Result has the times of one kind of event.
type Result struct {
	Event  string
	Times  []time.Duration // sorted
	Failed int             // failed requests in all rounds, with one every 10 ms
}

func (r Result) Median() time.Duration { return r.Times[len(r.Times)/2] }

const (
	asn, routerASN = 65000, 65001
	timeout        = 20 * time.Second
)

var vip = netip.MustParseAddr("203.0.113.1")

type network struct {
	*lab.Topology
	router *peers.Router
	agents []*lab.Agent
	web    []*traffic.HTTPServer
}

// Run measures each event this many times.
func Run(binary string, rounds int, log io.Writer) (all []Result, err error) {
	t, err := lab.NewTopology(lab.Shape{Balancers: 2, Servers: 2, Wired: true})
	if err != nil {
		return nil, err
	}
	n := &network{Topology: t}
	defer func() { err = errors.Join(err, t.Close()) }()
	ctx, cancel := context.WithTimeout(context.Background(), time.Duration(rounds)*2*time.Minute)
	defer cancel()
	if err := n.start(ctx, binary); err != nil {
		return nil, err
	}
	for _, e := range events {
		fmt.Fprintln(log, "convergence:", e.what)
		r := Result{Event: e.what}
		for range rounds {
			if err := n.round(ctx, e, &r); err != nil {
				return all, fmt.Errorf("%s: %w", e.what, err)
			}
		}
		slices.Sort(r.Times)
		all = append(all, r)
	}
	return all, nil
}

func (n *network) start(ctx context.Context, binary string) error {
	c := peers.RouterConfig{ID: netip.MustParseAddr("192.0.2.1"), ASN: routerASN, HoldTime: 30 * time.Second}
	for _, b := range n.Balancers {
		c.Neighbors = append(c.Neighbors, peers.Neighbor{Address: b.V4, ASN: asn, BFD: true})
	}
	var err error
	if n.router, err = peers.StartRouter(ctx, n.Router, peers.BIRD, c); err != nil {
		return err
	}
	for _, s := range n.Servers {
		web, err := traffic.ServeHTTP(s.Host, s.Name(), s.At(8080)...)
		if err != nil {
			return err
		}
		n.web = append(n.web, web)
	}
	for _, b := range n.Balancers {
		a, err := lab.StartAgent(b.Host, lab.AgentOptions{Binary: binary, Config: n.config(b).TOML()})
		if err != nil {
			return err
		}
		n.agents = append(n.agents, a)
	}
	return n.settle(ctx)
}

func (n *network) config(b lab.Node) lab.AgentConfig {
	c := lab.BGPAgent(b, asn, routerASN, lab.AgentService{
		Name: "web", Addresses: []netip.Addr{vip}, Ports: []string{"80:8080"},
		Backends: []lab.AgentBackend{{Address: n.Servers[0].V4}, {Address: n.Servers[1].V4}},
		Check: lab.AgentCheck{Type: "http", Path: "/healthz", Interval: 100 * time.Millisecond,
			Timeout: 50 * time.Millisecond, Rise: 1, Fall: 2},
	})
	c.LogLevel = ""
	c.Peers = c.Peers[:1] // only the session over IPv4
	c.Peers[0].HoldTime = 30 * time.Second
	c.Peers[0].Extra = "bfd = true"
	return c
}

// settle waits until both nodes are next hops and both servers respond.
func (n *network) settle(ctx context.Context) error {
	if _, err := n.hops(ctx, 2); err != nil {
		return err
	}
	_, err := lab.Until(ctx, timeout, "both servers answer", func() error {
		r := traffic.From(n.Clients[0].Host).Load(ctx, traffic.Load{URL: url(), Requests: 20, Timeout: time.Second})
		if err := r.Err(); err != nil {
			return err
		}
		if len(r.Servers) != 2 {
			return fmt.Errorf("only these servers answered: %v", r.Servers)
		}
		return nil
	})
	return err
}

func url() string { return fmt.Sprintf("http://%s/", netip.AddrPortFrom(vip, 80)) }

// hops waits until the router has this many next hops for the VIP, and returns how long it took.
func (n *network) hops(ctx context.Context, want int) (time.Duration, error) {
	ctx, cancel := context.WithTimeout(ctx, timeout)
	defer cancel()
	start := time.Now()
	for {
		hops, err := n.Router.NextHops(netip.PrefixFrom(vip, 32))
		if err == nil && len(hops) == want {
			return time.Since(start), nil
		}
		if ctx.Err() != nil {
			return 0, fmt.Errorf("the router has next hops %v, not %d: %w", hops, want, errors.Join(err, ctx.Err()))
		}
		time.Sleep(time.Millisecond)
	}
}

// round causes an event once and undoes it.
func (n *network) round(ctx context.Context, e event, r *Result) error {
	stream := traffic.From(n.Clients[0].Host).Stream(ctx, url(), 10*time.Millisecond, time.Second)
	time.Sleep(300 * time.Millisecond)
	begin := time.Now()
	err := e.happens(n)
	var took time.Duration
	if err == nil {
		took, err = e.over(ctx, n, begin, stream)
	}
	time.Sleep(100 * time.Millisecond)
	for _, s := range stream.Stop() {
		if s.Err != nil {
			r.Failed++
		}
	}
	r.Times = append(r.Times, took)
	return errors.Join(err, e.undo(n), n.settle(ctx))
}

// event is a failure that undo repairs.
type event struct {
	what    string
	happens func(*network) error
	// over waits until the network has converged and returns the time since begin.
	over func(ctx context.Context, n *network, begin time.Time, s *traffic.Stream) (time.Duration, error)
	undo func(*network) error
}

var events = []event{
	{"one of two servers stops: the last failed request", (*network).stopOne, lastFailure, (*network).startServers},
	{"all servers stop: both routes gone", (*network).stopServers, routes(0), (*network).startServers},
	{"node frozen: its route gone", signal(syscall.SIGSTOP), routes(1), signal(syscall.SIGCONT)},
	{"link of a node cut: its route gone", (*network).cut, routes(1), (*network).mend},
	{"node stops as planned: its route gone", (*network).terminate, routes(1), (*network).startAgent},
}

func routes(left int) func(context.Context, *network, time.Time, *traffic.Stream) (time.Duration, error) {
	return func(ctx context.Context, n *network, begin time.Time, _ *traffic.Stream) (time.Duration, error) {
		_, err := n.hops(ctx, left)
		return time.Since(begin), err
	}
}

// lastFailure returns when the last request failed, or 0 if none did.
func lastFailure(_ context.Context, _ *network, begin time.Time, s *traffic.Stream) (last time.Duration, err error) {
	time.Sleep(2 * time.Second)
	for _, x := range s.Samples() {
		if x.Err != nil {
			last = max(last, x.Start.Sub(begin))
		}
	}
	return last, nil
}

func (n *network) stopOne() error { return n.web[0].Stop() }

func (n *network) stopServers() error { return errors.Join(n.web[0].Stop(), n.web[1].Stop()) }

func (n *network) startServers() error { return errors.Join(n.web[0].Start(), n.web[1].Start()) }

func signal(s syscall.Signal) func(*network) error {
	return func(n *network) error { return n.agents[0].Process().Signal(s) }
}

func (n *network) cut() error { return n.Router.SetDown(n.Balancers[0].Port) }

func (n *network) mend() error { return n.Router.SetUp(n.Balancers[0].Port) }

func (n *network) terminate() error { return n.agents[0].Process().Signal(syscall.SIGTERM) }

func (n *network) startAgent() error {
	ctx, cancel := context.WithTimeout(context.Background(), timeout)
	defer cancel()
	return errors.Join(n.agents[0].Process().Wait(ctx), n.agents[0].Start())
}
