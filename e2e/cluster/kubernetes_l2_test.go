package cluster

import (
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	core "k8s.io/api/core/v1"
	meta "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/steelyard-lb/steelyard/e2e/lab"
	"github.com/steelyard-lb/steelyard/e2e/lab/kube"
	"github.com/steelyard-lb/steelyard/e2e/lab/labtest"
	"github.com/steelyard-lb/steelyard/lb/lbtest/must"
)

// segmentCluster is a cluster whose nodes announce only with ARP and NDP. Nodes are not configured with the others:
// they find them through the API, and the keys in the Secret that an agent fills with the manifest's rights.
type segmentCluster struct {
	*cluster
	m    *labtest.Members
	pods []*pod
}

func newSegmentCluster(t *testing.T) *segmentCluster {
	c := startCluster(t, 3, "tunnel")
	for _, p := range []string{"203.0.113.254/24", "2001:db8:1::ffff/64"} {
		must.Do(t, c.Topology.Router.AddAddress("segment", netip.MustParsePrefix(p)))
	}
	c.install(t, "")
	kubeconfig := c.kubeconfigOf(t, "steelyard")
	// The first address of an IPv6 prefix belongs to its routers (RFC 4291, section 2.6.1).
	pool := strings.NewReplacer("203.0.113.0/24", "203.0.113.16/28", "2001:db8:1::/64", "2001:db8:1::10/124")
	s := &segmentCluster{cluster: c, m: &labtest.Members{Site: c.Site}}
	for i, b := range c.Balancers {
		c.join(t, i)
		c.register(t, i)
		a := lab.AgentConfig{
			Name: b.Name(), Address: b.V4, Interfaces: []string{"eth0"}, Mode: "tc", L2: []string{"eth0"},
			LogLevel: "debug", Env: []string{"POD_NAMESPACE=steelyard"},
			Extra: fmt.Sprintf(pool.Replace(clusterTOML),
				kube.KubeconfigPath, "tunnel", "replace", probeInterval, probeTimeout, probeFall),
		}
		must.Do(t, b.WriteFile(kube.KubeconfigPath, kubeconfig, 0o600))
		c.Config = append(c.Config, a)
		if i == 0 {
			c.startAllocators(t)
		}
		c.Agents = append(c.Agents, labtest.Agent(t, b.Host, binary, a))
		s.pods = append(s.pods, c.startPod(t, fmt.Sprintf("pod-%d", i), i))
	}
	for _, name := range []string{"first", "second"} {
		c.createService(t, name, func(*core.Service) {})
		t.Cleanup(func() { c.deleteService(t, name) })
		s.m.VIPs = append(s.m.VIPs, c.waitAddresses(t, name)...)
		c.setEndpoints(t, name, s.pods...)
	}
	s.m.Settled(t, c.Agents...)
	c.waitAnswered(t, s.m.VIPs...)
	return s
}

// lose removes a node's pods from the endpoints, like the controllers if the node does not respond.
func (s *segmentCluster) lose(t *testing.T, a *lab.Agent) {
	left := slices.DeleteFunc(slices.Clone(s.pods), func(p *pod) bool { return s.Balancers[p.node].Host == a.Host })
	for _, name := range []string{"first", "second"} {
		s.setEndpoints(t, name, left...)
	}
}

// spreadsLocal checks that with policy Local, the owner forwards to all nodes with endpoints, including itself, in
// proportion to their number. Pods see the client's address. The owner itself may have no endpoint.
func (s *segmentCluster) spreadsLocal(t *testing.T) {
	others := s.m.VIPs
	defer func() { s.m.VIPs = others }()
	pods := slices.Concat(s.pods, []*pod{s.startPod(t, "local-more", 1)})
	s.createService(t, "local", local)
	defer s.deleteService(t, "local")
	addresses := s.waitAddresses(t, "local")
	s.m.VIPs = slices.Concat(others, addresses)
	s.setEndpoints(t, "local", pods...)
	owners := s.m.Settled(t, s.Agents...)
	s.waitAnswered(t, addresses...)
	spread := func(vip netip.Addr, pods []*pod) {
		t.Helper()
		labtest.Until(t, "the endpoints are active", func() error {
			r := s.Load(t, vip, 40)
			return labtest.ErrorIf(r.Err() != nil || len(r.Servers) != len(pods), "%s", r)
		})
		r := s.Load(t, vip, 2000)
		t.Logf("%s of %s: %s", vip, owners[vip], r)
		must.Do(t, r.Err())
		labtest.CheckEven(t, r, len(pods))
	}
	for _, vip := range addresses {
		spread(vip, pods)
	}
	s.checkClientAddress(t, pods...)
	vip := addresses[0]
	left := slices.DeleteFunc(slices.Clone(pods), func(p *pod) bool {
		return s.Balancers[p.node].Host == owners[vip].Host
	})
	s.setEndpoints(t, "local", left...)
	spread(vip, left)
	after := s.m.Settled(t, s.Agents...)[vip]
	must.True(t, after == owners[vip], "%s has moved from %s to %s", vip, owners[vip], after)
	s.checkClientAddress(t, pods...)
}

// TestMembersOfACluster checks that each address has one owner among the cluster's nodes, that another node takes over
// from a failed one, and that a planned shutdown loses no request, even while the API server is down.
func TestMembersOfACluster(t *testing.T) {
	s := newSegmentCluster(t)
	secret, err := s.api.CoreV1().Secrets("steelyard").Get(t.Context(), "steelyard-tunnel-keys", meta.GetOptions{})
	must.Need(t, err == nil && len(secret.Data["current"]) > 0,
		"the Secret of the keys: %v, %d entries", err, len(secret.Data))
	must := func(err error) {
		t.Helper()
		must.Do(t, err)
	}
	kubeconfig, err := s.Balancers[0].ReadFile(kube.KubeconfigPath)
	must(err)
	start := func(t *testing.T, a *lab.Agent) { must(errors.Join(a.Start(), a.WaitReady(t.Context(), lab.Ready))) }
	killed := labtest.TakeOver{Name: "killed", Fail: func(_ *testing.T, a *lab.Agent) { a.Kill() }, Back: start}
	planned := labtest.TakeOver{Name: "planned end", Fail: func(t *testing.T, a *lab.Agent) {
		must(a.Terminate(t.Context(), 20*time.Second))
	}, Back: start, Planned: true}
	off := labtest.TakeOver{Name: "power off", Fail: func(t *testing.T, a *lab.Agent) {
		must(a.PowerOff())
		s.lose(t, a)
	}, Back: func(t *testing.T, a *lab.Agent) {
		must(errors.Join(a.PowerOn(), a.WriteFile(kube.KubeconfigPath, kubeconfig, 0o600)))
		start(t, a)
		s.setEndpoints(t, "first", s.pods...)
		s.setEndpoints(t, "second", s.pods...)
		s.waitAnswered(t, s.m.VIPs...)
	}}
	t.Run("Local", s.spreadsLocal)
	for i, k := range []labtest.TakeOver{killed, off, planned} {
		t.Run(k.Name, func(t *testing.T) { s.m.TakesOver(t, s.m.VIPs[i], k) })
	}
	s.control.StopAPI()
	for i, k := range []labtest.TakeOver{killed, planned} {
		t.Run(k.Name+", API server away", func(t *testing.T) { s.m.TakesOver(t, s.m.VIPs[2+i], k) })
	}
	must(s.control.StartAPI(t.Context()))
}

// TestAddressPerNodeOfACluster checks that a Service with the annotation has an address of each family per node, on
// different nodes, and only one again without the annotation.
func TestAddressPerNodeOfACluster(t *testing.T) {
	t.Parallel()
	s := newSegmentCluster(t)
	before := s.m.VIPs
	annotate := func(value string) {
		t.Helper()
		api := s.api.CoreV1().Services("default")
		labtest.Until(t, "the Service is changed", func() error {
			service, err := api.Get(t.Context(), "first", meta.GetOptions{})
			if err != nil {
				return err
			}
			service.Annotations = map[string]string{"steelyard.dev/address-per-node": value}
			_, err = api.Update(t.Context(), service, meta.UpdateOptions{})
			return err
		})
	}
	wait := func(n int) (vips []netip.Addr) {
		t.Helper()
		labtest.Until(t, fmt.Sprintf("the Service has %d addresses", n), func() error {
			service, err := s.api.CoreV1().Services("default").Get(t.Context(), "first", meta.GetOptions{})
			if err != nil {
				return err
			}
			vips = nil
			for _, i := range service.Status.LoadBalancer.Ingress {
				vips = append(vips, netip.MustParseAddr(i.IP))
			}
			return labtest.ErrorIf(len(vips) != n, "it has %v", vips)
		})
		return vips
	}
	annotate("true")
	s.m.VIPs = wait(2 * len(s.Agents))
	if !slices.Equal(s.m.VIPs[:2], before[:2]) {
		t.Errorf("addresses %v; want the previous ones first: %v", s.m.VIPs, before[:2])
	}
	second := before[2:]
	s.deleteService(t, "second")
	s.m.Apart(t, s.Agents...)
	s.waitAnswered(t, s.m.VIPs...)
	annotate("false")
	if got := wait(2); !slices.Equal(got, before[:2]) {
		t.Errorf("addresses %v; want %v", got, before[:2])
	}
	s.m.VIPs = before[:2]
	s.createService(t, "second", func(*core.Service) {})
	got := s.waitAddresses(t, "second")
	must.True(t, len(got) == len(second), "addresses of the other Service: %v", got)
}
