package cluster

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	core "k8s.io/api/core/v1"

	"github.com/steelyard-lb/steelyard/e2e/lab"
	"github.com/steelyard-lb/steelyard/e2e/lab/labtest"
	"github.com/steelyard-lb/steelyard/e2e/lab/traffic"
	"github.com/steelyard-lb/steelyard/lb/lbtest/must"
)

func proxyFails(t *testing.T, c *cluster, pods ...*pod) {
	byLocal := c.startService(t, "proxied-local", local, []int{0, 1}, pods[0], pods[1])
	byCluster := c.startService(t, "proxied", func(*core.Service) {}, []int{0, 1, 2}, pods[0], pods[1])
	start := time.Now()
	c.stopProxy(c.Balancers[0])
	c.waitRouted(t, byLocal, 1)
	c.waitRouted(t, byCluster, 1, 2)
	took := time.Since(start)
	must.True(t, took <= probeBound+600*time.Millisecond, "withdrawn %s after its end; want %s", took, probeBound)
	out, err := c.Agents[0].CLI(t.Context(), "routes")
	must.True(t, err == nil && strings.Contains(out, "connection refused"),
		"routes does not have the reason: %v\n%s", err, out)
	c.startProxy(t, c.Balancers[0])
	c.waitRouted(t, byLocal, 0, 1)
	c.waitRouted(t, byCluster, 0, 1, 2)
	c.waitRecovered(t, pods...)
}

// allProxiesFail covers a bad object that breaks every service proxy. Our datapath does not need them, so the addresses
// stay, and routers prefer nodes whose proxy works.
func allProxiesFail(t *testing.T, c *cluster, pods ...*pod) {
	vips := c.startService(t, "unproxied", func(*core.Service) {}, []int{0, 1, 2}, pods[0], pods[1])
	for _, n := range c.Balancers {
		c.stopProxy(n)
	}
	for _, a := range c.Agents {
		labtest.Until(t, "the preference is lower", func() error {
			out, err := a.CLI(t.Context(), "routes")
			if err == nil && !strings.Contains(out, "with a lower preference: the service proxy's") {
				err = errors.New(out)
			}
			return err
		})
	}
	c.waitRouted(t, vips, 0, 1, 2)
	c.waitAnswered(t, vips...)
	c.startProxy(t, c.Balancers[2])
	c.waitRouted(t, vips, 2)
	c.startProxy(t, c.Balancers[0])
	c.startProxy(t, c.Balancers[1])
	c.waitRouted(t, vips, 0, 1, 2)
	c.waitRecovered(t, pods...)
}

func excludedNode(t *testing.T, c *cluster, pods ...*pod) {
	vips := c.startService(t, "excluded", func(*core.Service) {}, []int{0, 1, 2}, pods[0])
	label := func(text string, nodes ...int) {
		const key = "node.kubernetes.io/exclude-from-external-load-balancers"
		for _, n := range nodes {
			c.patchNode(t, n, fmt.Sprintf(`{"metadata":{"labels":{%q:%s}}}`, key, text))
		}
	}
	label(`""`, 1)
	c.waitRouted(t, vips, 0, 2)
	label(`"false"`, 1)
	c.waitRouted(t, vips, 0, 1, 2)
	label(`""`, 0, 1, 2)
	c.waitRouted(t, vips)
	c.waitSaid(t, "excluded", "NotAnnounced", "all 3 nodes have the label")
	for _, a := range c.Agents {
		labtest.Until(t, "the status says that no node may announce", func() error {
			out, err := a.CLI(t.Context(), "status")
			if !strings.Contains(out, "DEGRADED") || !strings.Contains(out, "all 3 nodes have the label") {
				return fmt.Errorf("%v: %s", err, out)
			}
			return nil
		})
	}
	label("null", 0, 1, 2)
	c.waitRouted(t, vips, 0, 1, 2)
	c.patchNode(t, 1, deletionTaint)
	c.waitRouted(t, vips, 0, 2)
	c.patchNode(t, 1, noTaint)
	c.waitRouted(t, vips, 0, 1, 2)
	c.waitRecovered(t, pods...)
}

const (
	deletionTaint = `{"spec":{"taints":[{"key":"ToBeDeletedByClusterAutoscaler","effect":"NoSchedule"}]}}`
	noTaint       = `{"spec":{"taints":null}}`
)

func agentKilled(t *testing.T, c *cluster, pods ...*pod) {
	vips := c.startService(t, "killed", local, []int{0, 1}, pods[0], pods[1])
	conns := labtest.Connect(t, c.Client(), netip.AddrPortFrom(vips[0], 9000), 60)
	stream := c.Client().Stream(t.Context(), labtest.URL(vips[0]), 5*time.Millisecond, 2*time.Second)
	waitRequests(t, stream, 100)
	for range 3 {
		c.Agents[0].Kill()
		waitRequests(t, stream, 100)
		must.Do(t, errors.Join(c.Agents[0].Start(), c.Agents[0].WaitReady(t.Context(), lab.Ready)))
		waitRequests(t, stream, 100)
	}
	stream.Stop()
	must.Do(t, stream.Between(time.Time{}, time.Time{}).Err())
	labtest.Exchange(t, conns, "after three kills")
	c.waitRouted(t, vips, 0, 1)
	c.waitRecovered(t, pods...)
}

func apiServerDown(t *testing.T, c *cluster, pods ...*pod) {
	vips := c.startService(t, "server-down", local, []int{0, 1}, pods[0], pods[1])
	conns := labtest.Connect(t, c.Client(), netip.AddrPortFrom(vips[0], 9000), 60)
	stream := c.Client().Stream(t.Context(), labtest.URL(vips[0]), 20*time.Millisecond, 2*time.Second)
	c.control.StopAPI()
	time.Sleep(time.Minute) // longer than the Lease and the watches' timeouts
	labtest.Exchange(t, conns, "while the API server is down")
	must.Do(t, c.control.StartAPI(t.Context()))
	stream.Stop()
	must.Do(t, stream.Between(time.Time{}, time.Time{}).Err())
	labtest.Exchange(t, conns, "after the API server has restarted")
	c.setEndpoints(t, "server-down", pods[0], pods[2])
	// The agents watch again within seconds. The new node's route also requires that its kube-proxy responds, whose
	// client may wait one minute before it watches again.
	labtest.Until(t, "the agent of the node without a pod has the new endpoints", func() error {
		out, err := c.Agents[1].CLI(t.Context(), "routes")
		return errors.Join(err, labtest.ErrorIf(!strings.Contains(out, "no ready endpoint is on this node"), "%s", out))
	})
	c.waitRouted(t, vips, 0, 2)
	c.waitRecovered(t, pods...)
}

// partitionHeals covers nodes that were cut off from the API server together with their kubelets, and then learn that
// no endpoint is ready. They keep the last endpoints until the kubelets have reported.
func partitionHeals(t *testing.T, c *cluster, pods ...*pod) {
	vips := c.startService(t, "healed", func(*core.Service) {}, []int{0, 1, 2}, pods[0], pods[1])
	stream := c.Client().Stream(t.Context(), labtest.URL(vips[0]), 20*time.Millisecond, 2*time.Second)
	waitRequests(t, stream, 100)
	cut := func(do string) (err error) {
		for _, n := range c.Balancers {
			_, failed := n.Run(context.Background(), "ip", "route", do, "blackhole", c.Servers[0].V4.String())
			err = errors.Join(err, failed)
		}
		return err
	}
	t.Cleanup(func() { _ = cut("del") }) // if the test ends early
	report := func(ready bool, status core.ConditionStatus) {
		pods[0].ready, pods[1].ready = ready, ready
		c.setEndpoints(t, "healed", pods[0], pods[1])
		for i := range c.Balancers {
			c.patchNode(t, i, fmt.Sprintf(`{"status":{"conditions":[{"type":"Ready","status":%q}]}}`, status), "status")
		}
	}
	told := func(agents []*lab.Agent, want bool, command, text string) {
		t.Helper()
		for _, a := range agents {
			labtest.Until(t, command+" says: "+text, func() error {
				out, err := a.CLI(t.Context(), command)
				return errors.Join(err, labtest.ErrorIf(strings.Contains(out, text) != want, "%t: %s", want, out))
			})
		}
	}
	must.Do(t, cut("add"))
	told(c.Agents, true, "status", "the API server has not answered since")
	time.Sleep(11 * time.Second) // shorter interruptions do not count
	report(false, core.ConditionUnknown)
	must.Do(t, cut("del"))
	told(c.Agents, true, "routes", "the last ones are kept for panic_hold")
	waitRequests(t, stream, 100)
	report(true, core.ConditionTrue)
	told(c.Agents, false, "routes", "panic_hold")
	stream.Stop()
	must.Do(t, stream.Between(time.Time{}, time.Time{}).Err())
	c.waitRecovered(t, pods...)
}

// coldBoot checks that a node that boots without the API server announces and serves what it last knew.
func coldBoot(t *testing.T, c *cluster, pods ...*pod) {
	everywhere := c.startService(t, "warm-boot", func(s *core.Service) { // it has a check only if all ports are TCP
		s.Spec.Ports = slices.DeleteFunc(s.Spec.Ports, func(p core.ServicePort) bool { return p.Name == "dns" })
	}, []int{0, 1, 2}, pods[0], pods[1])
	vips := c.startService(t, "cold-boot", local, []int{0, 1}, pods[0], pods[1])
	a := c.Agents[0]
	labtest.Until(t, "the state is stored", func() error {
		text, err := a.ReadFile("/run/steelyard/cluster.json")
		return errors.Join(err, labtest.ErrorIf(!strings.Contains(text, "cold-boot"), "the service is not in it"))
	})
	c.control.StopAPI()
	killedAlone(t, c, everywhere)
	must.Do(t, a.Terminate(t.Context(), 20*time.Second))
	must.Get(a.CLI(t.Context(), "cleanup"))(t) // as after a reboot
	c.waitRouted(t, vips, 1)
	must.Do(t, errors.Join(a.Start(), a.WaitReady(t.Context(), lab.Ready)))
	c.waitRouted(t, vips, 0, 1)
	c.waitAnswered(t, vips...)
	out, _ := a.CLI(t.Context(), "status")
	must.True(t, strings.Contains(out, "the API server has not answered since"), "status does not tell:\n%s", out)
	must.Do(t, c.control.StartAPI(t.Context()))
	c.waitRecovered(t, pods...)
	c.waitRouted(t, vips, 0, 1)
}

// killedAlone checks that an agent that is killed while the API server is down starts with what it last knew, and
// refuses no connection.
func killedAlone(t *testing.T, c *cluster, vips []netip.Addr) {
	t.Helper()
	a := c.Agents[0]
	stream := c.Client().Stream(t.Context(), labtest.URL(vips[0]), 5*time.Millisecond, 2*time.Second)
	waitRequests(t, stream, 100)
	a.Kill()
	waitRequests(t, stream, 100)
	must.Do(t, errors.Join(a.Start(), a.WaitReady(t.Context(), lab.Ready)))
	labtest.Until(t, "the last known state is used", func() error {
		out, err := a.CLI(t.Context(), "backends")
		return errors.Join(err, labtest.ErrorIf(strings.Count(out, "connected") < 2, "%s", out))
	})
	waitRequests(t, stream, 500)
	stream.Stop()
	must.Do(t, stream.Between(time.Time{}, time.Time{}).Err())
	c.waitRouted(t, vips, 0, 1, 2)
}

// waitRecovered waits until every agent and kube-proxy watches the API server and works. For a new Service, every
// node's health check node port must respond, and the router must have a route through every node. A scenario that
// stops one of them calls it last. pods has one pod per node.
func (c *cluster) waitRecovered(t *testing.T, pods ...*pod) {
	t.Helper()
	const name = "recovered"
	s := c.createService(t, name, local)
	defer c.deleteService(t, name)
	vips := c.waitAddresses(t, name)
	c.setEndpoints(t, name, pods...)
	for _, node := range c.Balancers {
		at := netip.AddrPortFrom(node.V4, uint16(s.Spec.HealthCheckNodePort))
		labtest.Until(t, fmt.Sprintf("the health check node port of %s responds", node), func() error {
			ctx, cancel := context.WithTimeout(t.Context(), time.Second)
			defer cancel()
			got, err := c.Client().Get(ctx, fmt.Sprintf("http://%s/", at))
			return errors.Join(err, labtest.ErrorIf(got.Status != http.StatusOK, "status %d: %s", got.Status, got.Body))
		})
	}
	c.waitRouted(t, vips, 0, 1, 2)
	c.waitAnswered(t, vips...)
}

// recover starts everything that a failed scenario has left stopped, and waits until the cluster works.
func (c *cluster) recover(t *testing.T, pods ...*pod) {
	t.Helper()
	if !c.control.API.Running() {
		must.Do(t, c.control.StartAPI(t.Context()))
	}
	for _, n := range c.Balancers {
		c.showProxy(t, n)
		c.startProxy(t, n)
	}
	for _, a := range c.Agents {
		a.Kill()
		must.Do(t, errors.Join(a.Start(), a.WaitReady(t.Context(), lab.Ready)))
	}
	if len(c.allocators) > 0 {
		for _, p := range c.allocators {
			p.Kill()
		}
		c.startAllocators(t)
	}
	c.waitRecovered(t, pods...)
}

// waitRequests waits until n more requests have been answered or have failed.
func waitRequests(t *testing.T, s *traffic.Stream, n int) {
	t.Helper()
	want := len(s.Samples()) + n
	labtest.Until(t, fmt.Sprintf("%d more requests end", n), func() error {
		have := len(s.Samples())
		return labtest.ErrorIf(have < want, "%d of %d", have, want)
	})
}
