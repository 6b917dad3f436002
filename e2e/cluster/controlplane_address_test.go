package cluster

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/netip"
	"strings"
	"syscall"
	"testing"
	"time"

	core "k8s.io/api/core/v1"
	discovery "k8s.io/api/discovery/v1"
	meta "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/intstr"

	"github.com/steelyard-lb/steelyard/e2e/lab"
	"github.com/steelyard-lb/steelyard/e2e/lab/kube"
	"github.com/steelyard-lb/steelyard/e2e/lab/labtest"
	"github.com/steelyard-lb/steelyard/lb/lbtest/must"
)

// TestControlPlaneAddress: the address of the control plane is one that the nodes announce. All nodes boot at once, and
// reach the API server by that address only: they announce what they last knew, reach the API server through each
// other, and follow the cluster again.
func TestControlPlaneAddress(t *testing.T) {
	t.Parallel()
	c := newCluster(t, "nat", false)
	vip := c.startAPIService(t)
	c.waitRouted(t, []netip.Addr{vip}, 0, 1, 2)
	c.waitAPI(t, vip)
	old := c.control.URL()
	through := "https://" + netip.AddrPortFrom(vip, 6443).String()
	for _, p := range c.allocators { // the nodes assign addresses from now on
		must.Do(t, p.Signal(syscall.SIGTERM))
	}
	for i, a := range c.Agents {
		labtest.Until(t, 20*time.Second, "the state is stored", func() error {
			text, err := a.ReadFile("/run/steelyard/cluster.json")
			return errors.Join(err, labtest.ErrorIf(!strings.Contains(text, "apiserver"), "the service is not in it"))
		})
		must.Do(t, a.Terminate(t.Context(), 20*time.Second))
		must.Get(a.CLI(t.Context(), "cleanup"))(t) // as a reboot does
		text := strings.ReplaceAll(c.control.Kubeconfig(), old, through)
		must.Do(t, c.Balancers[i].WriteFile(kube.KubeconfigPath, text, 0o600))
		must.Do(t, a.Configure(strings.Replace(c.Config[i].TOML(), "allocate = false\n", "", 1)))
	}
	c.waitRouted(t, []netip.Addr{vip})
	must.Do(t, c.Agents[0].Start())
	c.waitRouted(t, []netip.Addr{vip}, 0)
	c.waitFollowing(t, c.Agents[0])
	c.createService(t, "first", func(*core.Service) {})
	c.waitAddresses(t, "first")
	// The connections of the first node move to others, which do not know them.
	for _, a := range c.Agents[1:] {
		must.Do(t, a.Start())
	}
	c.waitRouted(t, []netip.Addr{vip}, 0, 1, 2)
	c.waitAPI(t, vip)
	c.createService(t, "later", func(*core.Service) {})
	c.waitAddresses(t, "later")
	c.waitFollowing(t, c.Agents...)
}

// waitFollowing waits until agents are connected to the API server.
func (c *cluster) waitFollowing(t *testing.T, agents ...*lab.Agent) {
	t.Helper()
	for _, a := range agents {
		labtest.Until(t, 3*time.Minute, "the agent follows the cluster", func() error {
			out, err := a.CLI(t.Context(), "status")
			return errors.Join(err, labtest.ErrorIf(strings.Contains(out, "the API server is away"), "%s", out))
		})
	}
}

// startAPIService creates a Service whose endpoint is the API server, and returns its address.
func (c *cluster) startAPIService(t *testing.T) netip.Addr {
	t.Helper()
	const name, port = "apiserver", 6443
	single := core.IPFamilyPolicySingleStack
	c.createService(t, name, func(s *core.Service) {
		s.Spec.IPFamilyPolicy, s.Spec.IPFamilies = &single, []core.IPFamily{core.IPv4Protocol}
		s.Spec.Ports = []core.ServicePort{{Name: "https", Port: port, TargetPort: intstr.FromInt32(port)}}
	})
	portName, number, tcp, ready := "https", int32(port), core.ProtocolTCP, true
	slice := &discovery.EndpointSlice{
		ObjectMeta: meta.ObjectMeta{
			Name: name, Namespace: "default", Labels: map[string]string{discovery.LabelServiceName: name},
		},
		AddressType: discovery.AddressTypeIPv4,
		Ports:       []discovery.EndpointPort{{Name: &portName, Port: &number, Protocol: &tcp}},
		Endpoints: []discovery.Endpoint{{
			Addresses: []string{c.control.Address.String()}, Conditions: discovery.EndpointConditions{Ready: &ready},
		}},
	}
	must.Get(c.api.DiscoveryV1().EndpointSlices("default").Create(t.Context(), slice, meta.CreateOptions{}))(t)
	return c.waitAddresses(t, name)[0]
}

// waitAPI waits until the API server answers the client by a VIP.
func (c *cluster) waitAPI(t *testing.T, vip netip.Addr) {
	t.Helper()
	client := http.Client{Timeout: 2 * time.Second, Transport: &http.Transport{
		DisableKeepAlives: true, TLSClientConfig: &tls.Config{InsecureSkipVerify: true},
		DialContext: func(ctx context.Context, network, addr string) (net.Conn, error) {
			return c.Clients[0].Dial(ctx, network, addr)
		},
	}}
	at := fmt.Sprintf("https://%s/version", netip.AddrPortFrom(vip, 6443))
	labtest.Until(t, 20*time.Second, at+" answers", func() error {
		resp, err := client.Get(at)
		if err != nil {
			return err
		}
		defer resp.Body.Close()
		text, err := io.ReadAll(resp.Body)
		if err == nil && !strings.Contains(string(text), "Status") && !strings.Contains(string(text), "gitVersion") {
			err = lab.Permanent(fmt.Errorf("%s: %s", resp.Status, text))
		}
		return err
	})
}
