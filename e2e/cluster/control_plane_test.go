package cluster

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	core "k8s.io/api/core/v1"
	meta "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/clientcmd"

	"github.com/steelyard-lb/steelyard/e2e/lab"
	"github.com/steelyard-lb/steelyard/e2e/lab/kube"
	"github.com/steelyard-lb/steelyard/e2e/lab/labtest"
	"github.com/steelyard-lb/steelyard/lb/lbtest/must"
)

// controlPlaneTOML is the configuration of each machine of a control plane, before the first start of Kubernetes.
const controlPlaneTOML = `
[[service]]
name = "control-plane"
address = %q
ports = ["6443"]
backends = [%s]
check = { type = "https", path = "/readyz", interval = "200ms", timeout = "150ms", fall = 2 }
`

// TestControlPlaneOnBalancers covers machines that balance the address of the control plane to their own API servers,
// by ARP and without another tool. Only etcd is on another machine. It measures time, so it runs alone.
func TestControlPlaneOnBalancers(t *testing.T) {
	topology := labtest.Topology(t, lab.Shape{Clients: 1, Balancers: 3, Servers: 1})
	s := &labtest.Site{Topology: topology}
	m := &labtest.Members{Site: s, VIPs: []netip.Addr{netip.MustParseAddr("192.0.2.100")}}
	dir := must.Get(filepath.Abs("../../.cache/controlplane"))(t)
	first := labtest.ControlPlane(t, s.Servers[0].Host, s.Servers[0].V4, dir)
	var backends []string
	for _, b := range s.Balancers {
		must.Get(first.Join(t.Context(), b.Host, b.V4))(t)
		backends = append(backends, fmt.Sprintf("%q", b.V4))
	}
	through := strings.ReplaceAll(first.Kubeconfig(), first.URL(), "https://192.0.2.100:6443")
	for _, b := range s.Balancers {
		a := lab.AgentConfig{
			Name: b.Name(), Address: b.V4, Interfaces: []string{"eth0"}, L2: []string{"eth0"},
			L2SecretFile: "/run/steelyard-lab/gossip.key", LogLevel: "debug",
			Extra: fmt.Sprintf(controlPlaneTOML, m.VIPs[0], strings.Join(backends, ", ")),
		}
		for _, other := range s.Balancers {
			if other.Host != b.Host {
				a.L2Members = append(a.L2Members, other.V4)
			}
		}
		must.Do(t, b.WriteFile(a.L2SecretFile, "a secret of the members\n", 0o600))
		must.Do(t, b.WriteFile(kube.KubeconfigPath, through, 0o600))
		s.Config = append(s.Config, a)
		s.Agents = append(s.Agents, labtest.Agent(t, b.Host, binary, a))
	}
	owner := m.Settled(t, s.Agents...)[m.VIPs[0]]
	var api kubernetes.Interface
	hosts := []*lab.Host{s.Clients[0].Host}
	for _, b := range s.Balancers {
		hosts = append(hosts, b.Host)
	}
	for _, h := range hosts {
		api = clientOn(t, h, through)
		labtest.Until(t, "the API server answers on "+h.Name(), func() error {
			_, err := api.Discovery().ServerVersion()
			return err
		})
	}
	t.Run("a power cut", func(t *testing.T) {
		var clients []*apiClient
		for _, h := range hosts {
			if h != owner.Host {
				clients = append(clients, watchGaps(t, h, through))
			}
		}
		time.Sleep(time.Second) // requests before the cut
		must.Do(t, owner.PowerOff())
		time.Sleep(6 * time.Second)
		for _, c := range clients {
			gap, requests := c.stop()
			t.Logf("%s: longest gap %s, %d requests answered", c.host.Name(), gap, requests)
			must.True(t, gap < 2500*time.Millisecond, "%s: longest gap %s; want at most 2.5 s", c.host.Name(), gap)
		}
	})
	t.Run("the same file serves the cluster", func(t *testing.T) {
		for i, a := range s.Agents {
			if a == owner {
				continue
			}
			text := s.Config[i].TOML() + fmt.Sprintf(`
[kubernetes]
kubeconfig = %q
[[pool]]
name = "control-plane"
addresses = ["192.0.2.100/32"]
auto_assign = false
[[pool]]
name = "public"
addresses = ["192.0.2.112/28"]
`, kube.KubeconfigPath)
			must.Do(t, errors.Join(a.Terminate(t.Context(), 20*time.Second), a.Configure(text), a.Start()))
		}
		home := &core.Namespace{ObjectMeta: meta.ObjectMeta{Name: "steelyard"}}
		labtest.Until(t, "the agents' namespace exists", func() error {
			_, err := api.CoreV1().Namespaces().Create(t.Context(), home, meta.CreateOptions{})
			return err
		})
		service := &core.Service{
			ObjectMeta: meta.ObjectMeta{Name: "web", Namespace: "default"},
			Spec:       core.ServiceSpec{Type: core.ServiceTypeLoadBalancer, Ports: []core.ServicePort{{Port: 80}}},
		}
		labtest.Until(t, "a Service can be created", func() error {
			_, err := api.CoreV1().Services("default").Create(t.Context(), service, meta.CreateOptions{})
			return err
		})
		labtest.Within(t, 2*time.Minute, "the Service has an address", func() error {
			s, err := api.CoreV1().Services("default").Get(t.Context(), "web", meta.GetOptions{})
			if err != nil {
				return err
			}
			return labtest.ErrorIf(len(s.Status.LoadBalancer.Ingress) == 0, "it has none")
		})
	})
}

// clientOn returns a client of the API server whose connections begin on h.
func clientOn(t *testing.T, h *lab.Host, kubeconfig string) kubernetes.Interface {
	t.Helper()
	c := must.Get(clientcmd.RESTConfigFromKubeConfig([]byte(kubeconfig)))(t)
	c.Dial, c.QPS = h.Dial, -1
	return must.Get(kubernetes.NewForConfig(c))(t)
}

// apiClient sends requests to the API server from a host, one after the other over a kept connection, like a kubelet.
type apiClient struct {
	host *lab.Host
	stop func() (longest time.Duration, answered int)
}

// watchGaps starts an apiClient. stop returns the longest time between two answers.
func watchGaps(t *testing.T, h *lab.Host, kubeconfig string) *apiClient {
	api := clientOn(t, h, kubeconfig)
	ctx, cancel := context.WithCancel(t.Context())
	var done sync.WaitGroup
	var longest time.Duration
	answered, last := 0, time.Now()
	done.Go(func() {
		for ctx.Err() == nil {
			request, end := context.WithTimeout(ctx, time.Second)
			_, err := api.CoreV1().Namespaces().List(request, meta.ListOptions{})
			end()
			if err == nil {
				answered++
				longest, last = max(longest, time.Since(last)), time.Now()
			}
			time.Sleep(20 * time.Millisecond)
		}
		longest = max(longest, time.Since(last))
	})
	return &apiClient{h, func() (time.Duration, int) {
		cancel()
		done.Wait()
		return longest, answered
	}}
}
