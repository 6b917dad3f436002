package cluster

import (
	"context"
	"errors"
	"io"
	"net/http"
	"net/netip"
	"regexp"
	"time"

	meta "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/steelyard-lb/steelyard/e2e/bench/scale"
	"github.com/steelyard-lb/steelyard/e2e/lab"
	"github.com/steelyard-lb/steelyard/e2e/lab/kube"
)

// idleTime is how long the agent's CPU time is measured while only heartbeats are sent.
const idleTime = time.Minute

// afterStart exceeds the time that an agent is busy after its start: after 16 seconds, it returns memory.
const afterStart = 20 * time.Second

// sleep waits for d, or until ctx ends.
func sleep(ctx context.Context, d time.Duration) error {
	select {
	case <-ctx.Done():
		return ctx.Err()
	case <-time.After(d):
		return nil
	}
}

// idle measures the agent while only heartbeats are sent.
func (b *bench) idle(ctx context.Context, r *Result) error {
	if err := sleep(ctx, afterStart); err != nil {
		return err
	}
	before, err := scale.ProcessTime(b.agent)
	if err != nil {
		return err
	}
	beats := b.beats.Load()
	if err := sleep(ctx, idleTime); err != nil {
		return err
	}
	r.Beats = float64(b.beats.Load()-beats) / (float64(b.Nodes) * float64(idleTime) / float64(leaseEvery))
	after, err := scale.ProcessTime(b.agent)
	if err != nil {
		return err
	}
	r.Idle = float64(after-before) / float64(idleTime)
	r.Resident, err = scale.Resident(b.agent)
	return err
}

// changePause is the time between changes while the agent's CPU time is measured.
const changePause = 50 * time.Millisecond

// change repeatedly changes an endpoint of the last Service, first to measure the times, then the CPU time while nobody
// queries the agent.
func (b *bench) change(ctx context.Context, r *Result) error {
	var times, requests, rest []time.Duration
	for i := range b.Changes {
		at := time.Now()
		if err := b.changeTo(ctx, i); err != nil {
			return err
		}
		requests = append(requests, time.Since(at))
		if err := b.inForce(ctx, changed(i)); err != nil {
			return err
		}
		times = append(times, time.Since(at))
		rest = append(rest, times[i]-requests[i])
	}
	r.P50, r.P99 = scale.Percentile(times, 50), scale.Percentile(times, 99)
	r.Request50, r.Request99 = scale.Percentile(requests, 50), scale.Percentile(requests, 99)
	r.Answered50, r.Answered99 = scale.Percentile(rest, 50), scale.Percentile(rest, 99)
	before, err := scale.ProcessTime(b.agent)
	if err != nil {
		return err
	}
	start := time.Now()
	for i := range b.Changes {
		if err := b.changeTo(ctx, b.Changes+i); err != nil {
			return err
		}
		if err := sleep(ctx, changePause); err != nil {
			return err
		}
	}
	idle := time.Duration(r.Idle * float64(time.Since(start)))
	after, err := scale.ProcessTime(b.agent)
	if err != nil {
		return err
	}
	r.CPU = max(0, after-before-idle) / time.Duration(b.Changes)
	b.last = changed(2*b.Changes - 1)
	return b.inForce(ctx, b.last)
}

// changed returns the last Service's only endpoint after change i.
func changed(i int) netip.Addr { return endpoint(1<<20 + i) }

// changeTo makes change i.
func (b *bench) changeTo(ctx context.Context, i int) error {
	s := b.slice(b.Services-1, changed(i))
	s.Endpoints = s.Endpoints[:1] // so that packets go to this one
	_, err := b.api.DiscoveryV1().EndpointSlices(namespace).Update(ctx, s, meta.UpdateOptions{})
	return err
}

// settleTime is how long a program that has started runs: it may emit Events some time after its start.
const settleTime = 10 * time.Second

// restart measures the requests to the API server when the agent, and kube-proxy, restart.
func (b *bench) restart(ctx context.Context, r *Result) error {
	node := b.Balancers[0]
	var proxy *lab.Process
	for _, program := range []struct {
		name  string
		start func() error
		ready func() error
		end   func() error
	}{
		{
			"steelyard", b.agent.Start, func() error { return b.inForce(ctx, b.last) },
			func() error { return b.agent.Terminate(ctx, 20*time.Second) },
		},
		{"kube-proxy", func() (err error) {
			proxy, err = b.control.StartKubeProxy(node.Host, kube.NFTables)
			return err
		}, func() error { return synced(ctx, node.Host) }, func() error {
			proxy.Kill()
			return nil
		}},
	} {
		if program.name == "steelyard" {
			if err := program.end(); err != nil {
				return err
			}
		}
		start := time.Now()
		for range b.Restarts {
			if err := program.start(); err != nil {
				return err
			}
			if err := program.ready(); err != nil {
				return err
			}
			if err := sleep(ctx, settleTime); err != nil {
				return err
			}
			if err := program.end(); err != nil {
				return err
			}
		}
		sum, err := b.control.Requests(start, program.name, node.V4)
		if err != nil {
			return err
		}
		r.Requests[program.name] = map[string]float64{}
		for kind, n := range sum {
			r.Requests[program.name][kind] = float64(n) / float64(b.Restarts)
		}
	}
	return nil
}

// ruleTime matches kube-proxy's metric once it has written its rules. Its health endpoint responds before that.
var ruleTime = regexp.MustCompile(`(?m)^kubeproxy_sync_proxy_rules_last_timestamp_seconds(\{.*\})? [1-9]`)

// synced waits until kube-proxy has written its rules.
func synced(ctx context.Context, h *lab.Host) error {
	client := &http.Client{Timeout: 10 * time.Second,
		Transport: &http.Transport{DialContext: h.Dial, DisableKeepAlives: true}}
	_, err := lab.Until(ctx, 5*time.Minute, "kube-proxy has written its rules", func() error {
		resp, err := client.Get("http://127.0.0.1:10249/metrics")
		if err != nil {
			return err
		}
		defer resp.Body.Close()
		text, err := io.ReadAll(resp.Body)
		if err == nil && !ruleTime.Match(text) {
			err = errors.New("not yet")
		}
		return err
	})
	return err
}
