package connections

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"time"

	core "k8s.io/api/core/v1"
	discovery "k8s.io/api/discovery/v1"
	meta "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/clientcmd"

	"github.com/steelyard-lb/steelyard/e2e/lab"
	"github.com/steelyard-lb/steelyard/e2e/lab/kube"
)

// prepareKubeProxy makes kube-proxy write its rules for two Services. Then it stops kube-proxy, so the rules stay but
// nothing else uses the CPUs.
func prepareKubeProxy(s *site, o Options) error {
	var proxy *lab.Process
	err := withServices(s, o, func(control *kube.ControlPlane) (err error) {
		proxy, err = control.StartKubeProxy(s.node, kube.NFTables)
		return err
	})
	if proxy != nil {
		proxy.Kill()
	}
	return errors.Join(err, s.node.Sysctl(map[string]string{"net.netfilter.nf_conntrack_tcp_timeout_time_wait": "1"}))
}

// prepareServiceProxy makes the agent the service proxy of a node whose pod is the client.
func prepareServiceProxy(s *site, o Options) error {
	err := withServices(s, o, func(control *kube.ControlPlane) error {
		if err := s.node.WriteFile(kube.KubeconfigPath, control.Kubeconfig(), 0o600); err != nil {
			return err
		}
		c := lab.AgentConfig{Name: s.node.Name(), Address: netip.MustParseAddr(serverSide)}
		c.Interfaces = []string{"servers"}
		c.Extra = fmt.Sprintf(`
[kubernetes]
kubeconfig = %q
proxy = "replace"
allocate = false
[[pool]]
name = "bench"
addresses = ["203.0.113.0/24"]
external_ips = true
`, kube.KubeconfigPath)
		_, err := lab.StartAgent(s.node, lab.AgentOptions{Binary: o.Binary, Config: c.TOML()})
		return err
	})
	return errors.Join(err, s.node.Sysctl(map[string]string{"net.netfilter.nf_conntrack_tcp_timeout_time_wait": "1"}))
}

// withServices starts a control plane with two Services, which have external IPs, until the program that start starts
// serves them.
func withServices(s *site, o Options, start func(*kube.ControlPlane) error) error {
	ctx, cancel := context.WithTimeout(context.Background(), 3*time.Minute)
	defer cancel()
	control, err := kube.StartControlPlane(ctx, s.node, netip.MustParseAddr(serverSide), o.ControlPlane)
	if err != nil {
		return err
	}
	defer func() {
		for _, p := range append(control.Processes, control.Etcd, control.API) {
			p.Kill()
		}
	}()
	config, err := clientcmd.RESTConfigFromKubeConfig([]byte(control.Kubeconfig()))
	if err != nil {
		return err
	}
	config.Dial = control.Dial
	api, err := kubernetes.NewForConfig(config)
	if err != nil {
		return err
	}
	node := &core.Node{ObjectMeta: meta.ObjectMeta{Name: s.node.Name()}}
	if _, err := api.CoreV1().Nodes().Create(ctx, node, meta.CreateOptions{}); err != nil {
		return err
	}
	if err := start(control); err != nil {
		return err
	}
	return errors.Join(createService(ctx, api, "all", vip, servers), createService(ctx, api, "one", vipOne, 1),
		s.forwards(ctx, vip), s.forwards(ctx, vipOne))
}

// createService creates a Service with an external IP whose endpoints are the first n servers.
func createService(ctx context.Context, api kubernetes.Interface, name, address string, n int) error {
	_, err := api.CoreV1().Services(meta.NamespaceDefault).Create(ctx, &core.Service{
		ObjectMeta: meta.ObjectMeta{Name: name},
		Spec:       core.ServiceSpec{ExternalIPs: []string{address}, Ports: []core.ServicePort{{Port: 80}}},
	}, meta.CreateOptions{})
	if err != nil {
		return err
	}
	ready, port, protocol := true, int32(80), core.ProtocolTCP
	slice := &discovery.EndpointSlice{
		ObjectMeta:  meta.ObjectMeta{Name: name, Labels: map[string]string{discovery.LabelServiceName: name}},
		AddressType: discovery.AddressTypeIPv4,
		Ports:       []discovery.EndpointPort{{Port: &port, Protocol: &protocol}},
	}
	for i := range n {
		slice.Endpoints = append(slice.Endpoints, discovery.Endpoint{
			Addresses:  []string{server(i).String()},
			Conditions: discovery.EndpointConditions{Ready: &ready},
		})
	}
	_, err = api.DiscoveryV1().EndpointSlices(meta.NamespaceDefault).Create(ctx, slice, meta.CreateOptions{})
	return err
}
