package agent

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"net/http"
	"net/http/httptest"
	"testing"

	core "k8s.io/api/core/v1"
	discovery "k8s.io/api/discovery/v1"
	meta "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/steelyard-lb/steelyard/lb"
	"github.com/steelyard-lb/steelyard/lb/kube"
	"github.com/steelyard-lb/steelyard/lb/lbtest"
	"github.com/steelyard-lb/steelyard/lb/lbtest/must"
)

// apiServer serves lists by their path, and watches without events. It returns the name of a kubeconfig.
func apiServer(t *testing.T, lists map[string]any) string {
	t.Helper()
	ended := make(chan struct{})
	s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		list, ok := lists[r.URL.Path]
		switch {
		case !ok || r.URL.Query().Has("sendInitialEvents"): // clients then send a list request
			http.Error(w, "not served", http.StatusBadRequest)
		case r.URL.Query().Has("watch"):
			w.Header().Set("Content-Type", "application/json")
			w.(http.Flusher).Flush()
			select {
			case <-r.Context().Done():
			case <-ended:
			}
		default:
			w.Header().Set("Content-Type", "application/json")
			json.NewEncoder(w).Encode(list)
		}
	}))
	t.Cleanup(func() { close(ended); s.Close() })
	return kubeconfigOf(t, s.URL)
}

// kubeconfigOf writes a kubeconfig for an API server and returns its name.
func kubeconfigOf(t *testing.T, url string) string {
	t.Helper()
	return writeConfig(t, "", fmt.Sprintf(`
apiVersion: v1
kind: Config
current-context: c
clusters: [{name: c, cluster: {server: %q}}]
contexts: [{name: c, context: {cluster: c, user: u}}]
users: [{name: u, user: {}}]
`, url))
}

// webInCluster are the lists of a cluster with the node n and the Service web with the address 203.0.113.10.
func webInCluster() map[string]any {
	list := func(version, kind string) meta.TypeMeta { return meta.TypeMeta{APIVersion: version, Kind: kind} }
	web := meta.ObjectMeta{Name: "web", Namespace: "default"}
	slice := web
	slice.Labels = map[string]string{discovery.LabelServiceName: "web"}
	name, port, protocol, ready := "", int32(8080), core.ProtocolTCP, true
	return map[string]any{
		"/api/v1/nodes": core.NodeList{TypeMeta: list("v1", "NodeList"), Items: []core.Node{{
			ObjectMeta: meta.ObjectMeta{Name: "n"},
		}}},
		"/api/v1/services": core.ServiceList{TypeMeta: list("v1", "ServiceList"), Items: []core.Service{{
			ObjectMeta: web,
			Spec: core.ServiceSpec{
				Type: core.ServiceTypeLoadBalancer, Ports: []core.ServicePort{{Port: 80, Protocol: protocol}},
			},
			Status: core.ServiceStatus{LoadBalancer: core.LoadBalancerStatus{
				Ingress: []core.LoadBalancerIngress{{IP: "203.0.113.10"}},
			}},
		}}},
		"/apis/discovery.k8s.io/v1/endpointslices": discovery.EndpointSliceList{
			TypeMeta: list("discovery.k8s.io/v1", "EndpointSliceList"),
			Items: []discovery.EndpointSlice{{
				ObjectMeta: slice, AddressType: discovery.AddressTypeIPv4,
				Endpoints: []discovery.Endpoint{{
					Addresses: []string{"10.0.0.21"}, Conditions: discovery.EndpointConditions{Ready: &ready},
				}},
				Ports: []discovery.EndpointPort{{Name: &name, Port: &port, Protocol: &protocol}},
			}},
		},
	}
}

// runCluster runs the source of a cluster and an engine in memory until the end of the test.
func runCluster(t *testing.T, lists map[string]any, proxy, healthz string) *lbtest.Fixture {
	t.Helper()
	cfg := parse(t, fmt.Sprintf("[kubernetes]\nkubeconfig = %q\nproxy = %q\nforward = \"nat\"\n"+
		"[probe]\nproxy_healthz = %q\n", apiServer(t, lists), proxy, healthz))
	memory := lbtest.New()
	engine := must.Get(lb.NewEngine(lb.EngineOptions{
		Datapath: memory, Announcer: memory, Prober: memory, Sources: []string{kube.Name},
		Settle: settleTimeout, Retry: retryDelay, Withdraw: withdrawTimeout, Log: discard,
	}))(t)
	o := Options{Config: cfg, Log: discard, KeepDir: t.TempDir(), api: new(apiDialer)}
	c := must.Get(newCluster(o, facts, engine, engine, nil, nil, nil))(t)
	ctx, cancel := context.WithCancel(t.Context())
	tasks := append(c.tasks, c.source, task{"engine", engine.Run})
	ended := make(chan error, len(tasks))
	for _, x := range tasks {
		go func() { ended <- x.run(ctx) }()
	}
	t.Cleanup(func() {
		cancel()
		for range tasks {
			if err := <-ended; err != nil && !errors.Is(err, context.Canceled) {
				t.Error(err)
			}
		}
	})
	return memory
}

// The source receives the reports of its prober: an address is withheld until the service proxy has responded.
func TestClusterReceivesHealth(t *testing.T) {
	t.Parallel()
	proxy := httptest.NewServer(http.HandlerFunc(func(http.ResponseWriter, *http.Request) {}))
	defer proxy.Close()
	memory := runCluster(t, webInCluster(), "kube-proxy", proxy.URL+"/healthz")
	eventually(t, "an announced address", func() bool { return len(memory.Announced()) == 1 })
}

// Without a service proxy the agent answers at health check node ports, and is healthy while its engine responds.
func TestClusterAnswersAtNodePorts(t *testing.T) {
	t.Parallel()
	none := httptest.NewServer(nil)
	none.Close()
	free := must.Get(net.Listen("tcp", ":0"))(t)
	port := free.Addr().(*net.TCPAddr).Port
	free.Close()
	lists := webInCluster()
	spec := &lists["/api/v1/services"].(core.ServiceList).Items[0].Spec
	spec.ExternalTrafficPolicy, spec.HealthCheckNodePort = core.ServiceExternalTrafficPolicyLocal, int32(port)
	slice := lists["/apis/discovery.k8s.io/v1/endpointslices"].(discovery.EndpointSliceList).Items[0]
	slice.Endpoints[0].NodeName = &facts.name
	runCluster(t, lists, "auto", none.URL+"/healthz")
	client := http.Client{Transport: &http.Transport{DisableKeepAlives: true}}
	eventually(t, "200 of the node port", func() bool {
		resp, err := client.Get(fmt.Sprintf("http://127.0.0.1:%d/healthz", port))
		if err != nil {
			return false
		}
		resp.Body.Close()
		return resp.StatusCode == http.StatusOK
	})
}
