package demo

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"time"

	"github.com/steelyard-lb/steelyard/e2e/lab"
	"github.com/steelyard-lb/steelyard/e2e/lab/traffic"
	"github.com/steelyard-lb/steelyard/lb"
)

// stepTimeout bounds a wait without its own limit. It allows for a slow and busy machine, such as one that runs four
// demos and loads the BPF programs of other agents.
const stepTimeout = time.Minute

func (s *show) announce(ctx context.Context) (string, error) {
	if err := errors.Join(s.startServers(), s.startRouter(s.routerConfig())); err != nil {
		return "", err
	}
	start := time.Now()
	if err := s.startAgents(); err != nil {
		return "", err
	}
	for _, a := range s.agents {
		if err := a.WaitReady(ctx, stepTimeout); err != nil {
			return "", err
		}
	}
	if _, err := s.routed(ctx, s.Balancers...); err != nil {
		return "", err
	}
	s.observed("the router has routes over both balancers, %s after their start", short(time.Since(start)))
	if err := s.showRoutes(); err != nil {
		return "", err
	}
	for _, vip := range vips {
		ping := func() error { return s.clients[0].Ping(ctx, vip) }
		if _, err := s.until(ctx, vip.String()+" answers ping", ping); err != nil {
			return "", err
		}
	}
	s.observed("%s and %s answer ping", vip4, vip6)
	return "both addresses are routed over lb1 and lb2 and answer ping", nil
}

// routed waits until the router's routes to both VIPs lead over exactly these balancers.
func (s *show) routed(ctx context.Context, balancers ...lab.Node) (time.Duration, error) {
	what := "the router routes both addresses over " + names(balancers)
	if len(balancers) == 0 {
		what = "the router has no route to either address"
	}
	return s.until(ctx, what, func() error {
		var all error
		for _, vip := range vips {
			got, err := s.Router.NextHops(host(vip))
			if err == nil && !slices.Equal(got, hops(vip, balancers...)) {
				err = fmt.Errorf("the router routes %s via %v", vip, got)
			}
			all = errors.Join(all, err)
		}
		return all
	})
}

// showRoutes shows the routes to the VIPs in the router's kernel.
func (s *show) showRoutes() error {
	for _, vip := range vips {
		got, err := s.Router.NextHops(host(vip))
		if err != nil {
			return err
		}
		if len(got) == 0 {
			s.note("%-18s no route", vip)
			continue
		}
		var via []string
		for _, b := range s.Balancers {
			for _, a := range b.At(0) {
				if slices.Contains(got, a.Addr()) {
					via = append(via, fmt.Sprintf("%s (%s)", a.Addr(), b.Name()))
				}
			}
		}
		s.note("%-18s via %s", vip, strings.Join(via, ", "))
	}
	return nil
}

func (s *show) balance(ctx context.Context) (string, error) {
	const each = 300
	before := s.forwarded()
	r := s.request(ctx, each)
	if r.Err() != nil {
		return "", fmt.Errorf("expected all %d requests to be answered; observed: %w", 2*each, r.Err())
	}
	s.observed("%d of %d requests answered, half of them over IPv6", r.Answered(), 2*each)
	s.bars(r.Servers)
	// A share is binomial around 200 with a standard deviation of 12; a share below 130 is not chance.
	for _, server := range s.Servers {
		if r.Servers[server.Name()] < 130 {
			return "", fmt.Errorf("expected about %d requests at %s; observed: %s", 2*each/3, server.Name(), r)
		}
	}
	by := minus(s.forwarded(), before)
	s.observed("lb1 forwarded %d of them, lb2 %d", by["lb1"], by["lb2"])
	if by["lb1"] < 200 || by["lb2"] < 200 {
		return "", fmt.Errorf("expected about %d requests by each balancer; observed: lb1 %d, lb2 %d",
			each, by["lb1"], by["lb2"])
	}
	return fmt.Sprintf("%d of %d requests answered: %s", r.Answered(), 2*each, r), nil
}

// disturbed starts traffic, injects a fault, and waits until requests are answered again. It returns the traffic, which
// is still running, and the time of the fault; the caller stops the traffic.
func (s *show) disturbed(ctx context.Context, fault func() error) (stream, time.Time, error) {
	start := time.Now()
	traffic := s.stream(ctx, requestInterval)
	_, err := s.until(ctx, "all requests are answered", func() error {
		if r := traffic.since(start); r.Answered() < 100 {
			return errors.New(r.String())
		}
		return traffic.since(start).Err()
	})
	at := time.Now()
	if err == nil {
		err = fault()
	}
	if err == nil {
		_, err = s.until(ctx, "requests are answered again", func() error { return traffic.settled(at) })
	}
	return traffic, at, err
}

func (s *show) serverFails(ctx context.Context) (string, error) {
	traffic, died, err := s.disturbed(ctx, func() error { return errors.Join(s.web[1].Stop(), s.echo[1].Stop()) })
	defer traffic.stop()
	if err != nil {
		return "", err
	}
	left, r := traffic.lastFailure(died).Sub(died), traffic.since(died)
	after := traffic.since(died.Add(left + time.Nanosecond))
	s.observed("no request reached s2 later than %s after its crash (expected: %s)",
		short(left), short(unhealthyTimeout))
	s.note("until then %d of %d requests failed; after that none of %d, served by:", len(r.Errors),
		len(r.Errors)+r.Answered()-after.Answered(), after.Answered())
	s.bars(after.Servers)
	// One second more than the checks need, because this machine runs all hosts.
	if left > unhealthyTimeout+time.Second {
		return "", fmt.Errorf("expected no failed request later than %v after the crash of s2; observed: one after %v",
			unhealthyTimeout, left)
	}
	if err := s.unhealthy(ctx, s.Servers[1]); err != nil {
		return "", err
	}
	failed := plural(len(r.Errors), "request")
	return fmt.Sprintf("no requests to s2 after %s; %s failed until then, none after", short(left), failed), nil
}

// unhealthy waits until both agents report a server as unhealthy, and shows the reason.
func (s *show) unhealthy(ctx context.Context, server lab.Node) error {
	for _, a := range s.agents {
		reason := ""
		what := fmt.Sprintf("%s reports %s as unhealthy", a.Name(), server.Name())
		_, err := s.until(ctx, what, func() error {
			var backends []lb.BackendStatus
			if err := a.Get(ctx, "/v1/backends", &backends); err != nil {
				return err
			}
			for _, b := range backends {
				if b.Address == server.V4 && b.State == lb.StateUnhealthy {
					reason = b.Reason
					return nil
				}
			}
			return errors.New("the agent does not list it")
		})
		if err != nil {
			return err
		}
		s.observed("%s reports about %s: %s", a.Name(), server.Name(), reason)
	}
	return nil
}

func (s *show) allServersFail(ctx context.Context) (string, error) {
	start := time.Now()
	for i, w := range s.web {
		if err := errors.Join(w.Stop(), s.echo[i].Stop()); err != nil {
			return "", err
		}
	}
	if _, err := s.routed(ctx); err != nil {
		return "", err
	}
	took := time.Since(start)
	s.observed("the router no longer has a route, %s after the last server stopped", short(took))
	if err := s.showRoutes(); err != nil {
		return "", err
	}
	ctx, cancel := context.WithTimeout(ctx, requestTimeout)
	defer cancel()
	_, err := s.clients[0].Get(ctx, url(vip4))
	if err == nil {
		return "", errors.New("expected a request to fail without a route; observed: a response")
	}
	s.observed("a client gets an error immediately: %s", lastPart(err))
	return fmt.Sprintf("the routes were withdrawn after %s", short(took)), nil
}

func (s *show) recovery(ctx context.Context) (string, error) {
	start := time.Now()
	for i, w := range s.web {
		if err := errors.Join(w.Start(), s.echo[i].Start()); err != nil {
			return "", err
		}
	}
	if _, err := s.routed(ctx, s.Balancers...); err != nil {
		return "", err
	}
	back := time.Since(start)
	s.observed("the router has its routes again, %s after the servers started", short(back))
	var r traffic.Result
	_, err := s.until(ctx, "all three servers respond", func() error {
		if r = s.request(ctx, 60); r.Err() != nil {
			return lab.Permanent(fmt.Errorf("a route is installed before its servers respond: %w", r.Err()))
		}
		if len(r.Servers) < len(s.Servers) {
			return errors.New(r.String())
		}
		return nil
	})
	if err != nil {
		return "", err
	}
	_, err = s.until(ctx, "all backends are healthy", func() error { return s.healthy(ctx) })
	if err != nil {
		return "", err
	}
	s.observed("%d of %d requests answered", r.Answered(), r.Answered()+len(r.Errors))
	s.bars(r.Servers)
	return fmt.Sprintf("routes installed after %s; all three servers respond", short(back)), nil
}

func names(nodes []lab.Node) string {
	var all []string
	for _, n := range nodes {
		all = append(all, n.Name())
	}
	return strings.Join(all, " and ")
}

// minus returns a - b for each name.
func minus(a, b map[string]int) map[string]int {
	d := map[string]int{}
	for name := range a {
		d[name] = a[name] - b[name]
	}
	return d
}

func host(vip netip.Addr) netip.Prefix { return netip.PrefixFrom(vip, vip.BitLen()) }

// lastPart returns the innermost cause of an error: the text after the last colon.
func lastPart(err error) string {
	parts := strings.Split(err.Error(), ": ")
	return parts[len(parts)-1]
}

// healthy returns an error while a balancer considers a backend not healthy. Each port has its own checks.
func (s *show) healthy(ctx context.Context) error {
	for _, a := range s.agents {
		var all []struct{ Address, State string }
		if err := a.Get(ctx, "/v1/backends", &all); err != nil {
			return err
		}
		for _, b := range all {
			if b.State != "healthy" {
				return fmt.Errorf("%s is %s", b.Address, b.State)
			}
		}
	}
	return nil
}
