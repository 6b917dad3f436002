package demo

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"time"

	"github.com/steelyard-lb/steelyard/e2e/lab"
	"github.com/steelyard-lb/steelyard/e2e/lab/traffic"
)

// heldConns is the number of connections that each client holds open while an agent is killed.
const heldConns = 20

func (s *show) agentKilled(ctx context.Context) (string, error) {
	var conns []*traffic.Conns
	for i, vip := range vips {
		c, err := s.clients[i].Connect(ctx, netip.AddrPortFrom(vip, echoPort), heldConns)
		if err != nil {
			return "", fmt.Errorf("expected %d connections to %s; observed: %w", heldConns, vip, err)
		}
		defer c.Close()
		conns = append(conns, c)
	}
	agent := s.agents[0]
	traffic, died, err := s.disturbed(ctx, func() error { agent.Kill(); return nil })
	defer traffic.stop()
	if err != nil {
		return "", err
	}
	if _, err := s.routed(ctx, s.Balancers...); err != nil {
		return "", err
	}
	s.observed("lb1 has had no agent for %s: its route is still installed, and %d requests were answered",
		short(time.Since(died)), traffic.since(died).Answered())
	if err := echoed(ctx, conns); err != nil {
		return "", err
	}
	s.observed("all %d connections opened before still work", len(conns)*heldConns)
	if err := agent.Start(); err != nil {
		return "", err
	}
	if err := s.returned(ctx, agent); err != nil {
		return "", err
	}
	again := time.Now()
	_, err = s.until(ctx, "requests are answered", func() error { return traffic.settled(again) })
	if err != nil {
		return "", err
	}
	if err := echoed(ctx, conns); err != nil {
		return "", err
	}
	traffic.stop()
	r := traffic.since(died)
	if r.Err() != nil {
		return "", fmt.Errorf("expected no request to fail while an agent stops or starts; observed: %w",
			r.Err())
	}
	s.observed("the new agent adopted the state in the kernel: none of %d requests failed, and no connection was lost",
		r.Answered())
	return fmt.Sprintf("0 of %d requests failed, 0 of %d connections lost", r.Answered(), len(conns)*heldConns), nil
}

// returned waits until a restarted agent has its sessions, and the router has routes over both balancers.
func (s *show) returned(ctx context.Context, a *lab.Agent) error {
	if err := a.WaitReady(ctx, stepTimeout); err != nil {
		return err
	}
	what := "the router has sessions with " + a.Name() + " again"
	_, err := s.until(ctx, what, func() error { return sessions(ctx, a) })
	if err != nil {
		return err
	}
	_, err = s.routed(ctx, s.Balancers...)
	return err
}

// sessions returns an error unless all BGP sessions of an agent are up.
func sessions(ctx context.Context, a *lab.Agent) error {
	var peers []struct{ Peer, State, Reason string }
	if err := a.Get(ctx, "/v1/peers", &peers); err != nil {
		return err
	}
	if len(peers) == 0 {
		return errors.New("the agent has no peers")
	}
	for _, p := range peers {
		if p.State != "established" {
			return fmt.Errorf("the session with %s is %s %s", p.Peer, p.State, p.Reason)
		}
	}
	return nil
}

// echoed exchanges a message over every connection, and returns an error if a connection has no echo.
func echoed(ctx context.Context, sets []*traffic.Conns) error {
	ctx, cancel := context.WithTimeout(ctx, 5*time.Second)
	defer cancel()
	for _, c := range sets {
		if lost := c.Exchange(ctx); len(lost) > 0 {
			return fmt.Errorf("expected an echo on all %d connections; observed: none on %d, for example: %w",
				heldConns, len(lost), lost[0])
		}
	}
	return nil
}

// lossTimeout bounds how long requests may fail after a balancer has lost power. The link goes down at the router
// immediately; a request in flight through that balancer is lost, and the client notices when it times out.
const lossTimeout = time.Second

func (s *show) powerOff(ctx context.Context) (string, error) {
	traffic, died, err := s.disturbed(ctx, s.Balancers[0].PowerOff)
	defer traffic.stop()
	if err != nil {
		return "", err
	}
	if _, err := s.routed(ctx, s.Balancers[1]); err != nil {
		return "", err
	}
	lost, r := traffic.lastFailure(died).Sub(died), traffic.since(died)
	s.observed("the router sends all packets to lb2")
	if err := s.showRoutes(); err != nil {
		return "", err
	}
	if lost > lossTimeout {
		return "", fmt.Errorf("expected no failed request later than %v after the power loss; observed: one after %v",
			lossTimeout, lost)
	}
	s.observed("%s", failures(r))
	if len(r.Errors) > 0 {
		s.note("the last one was sent %s after the loss of power", short(lost))
	}
	s.bars(r.Servers)
	return "lb2 serves all; " + failures(r), nil
}

func (s *show) powerOn(ctx context.Context) (string, error) {
	start := time.Now()
	if err := errors.Join(s.Balancers[0].PowerOn(), s.agents[0].Start()); err != nil {
		return "", err
	}
	if err := s.returned(ctx, s.agents[0]); err != nil {
		return "", err
	}
	took := time.Since(start)
	s.observed("the router has routes over both balancers again, %s after power on", short(took))
	before := s.forwarded()
	var r traffic.Result
	_, err := s.until(ctx, "all requests are answered", func() error {
		r = s.request(ctx, 150)
		return r.Err()
	})
	if err != nil {
		return "", err
	}
	by := minus(s.forwarded(), before)
	s.observed("%d of %d requests answered; forwarded by:", r.Answered(), r.Answered()+len(r.Errors))
	s.bars(by)
	if by["lb1"] == 0 {
		return "", fmt.Errorf("expected lb1 to forward again; observed: %v", by)
	}
	return fmt.Sprintf("lb1 announced again %s after power on and forwards", short(took)), nil
}

// inFlight is the number of requests that may fail when routes move from one balancer to another: the requests in
// flight, at 200 per second and about a millisecond each. The new balancer has no entry for a flow that moves to it.
const inFlight = 3

func (s *show) maintenance(ctx context.Context) (string, error) {
	agent := s.agents[1]
	took := time.Duration(0)
	traffic, asked, err := s.disturbed(ctx, func() error {
		start := time.Now()
		err := agent.Terminate(ctx, stepTimeout)
		took = time.Since(start)
		return err
	})
	defer traffic.stop()
	if err != nil {
		return "", err
	}
	s.observed("lb2 withdrew its routes and exited with status 0 within %s", short(took))
	if _, err := s.routed(ctx, s.Balancers[0]); err != nil {
		return "", err
	}
	if err := s.showRoutes(); err != nil {
		return "", err
	}
	r := traffic.since(asked)
	if len(r.Errors) > inFlight {
		return "", fmt.Errorf("expected a planned stop to fail only requests in flight; observed: %w",
			r.Err())
	}
	s.observed("%s", failures(r))
	return fmt.Sprintf("withdrawn and stopped in %s; %s", short(took), failures(r)), nil
}

// failures returns a phrase such as "2 of 250 requests failed".
func failures(r traffic.Result) string {
	return fmt.Sprintf("%d of %d requests failed", len(r.Errors), len(r.Errors)+r.Answered())
}
