package agent

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	core "k8s.io/api/core/v1"
	discovery "k8s.io/api/discovery/v1"
	meta "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/steelyard-lb/steelyard/config"
	"github.com/steelyard-lb/steelyard/datapath"
	"github.com/steelyard-lb/steelyard/lb"
	"github.com/steelyard-lb/steelyard/lb/kube"
	"github.com/steelyard-lb/steelyard/lb/lbtest"
	"github.com/steelyard-lb/steelyard/lb/lbtest/must"
)

// keysInCluster returns the objects of an API server whose Secret has these keys.
func keysInCluster(k kube.Keys) map[string]any {
	secret := core.Secret{
		TypeMeta:   meta.TypeMeta{APIVersion: "v1", Kind: "Secret"},
		ObjectMeta: meta.ObjectMeta{Name: kube.KeySecret, Namespace: defaultNamespace}, Data: k.Data(),
	}
	list := core.SecretList{TypeMeta: meta.TypeMeta{APIVersion: "v1", Kind: "SecretList"}, Items: []core.Secret{secret}}
	path := "/api/v1/namespaces/" + defaultNamespace + "/secrets"
	return map[string]any{path: list, path + "/" + kube.KeySecret: secret}
}

func keysOf(seed byte, current string) kube.Keys {
	k := kube.Keys{
		Previous: []byte("the previous key " + current), Current: []byte("the current key " + current),
		Next: []byte("the key that is next " + current), Rotated: time.Now().Truncate(time.Second), Required: true,
	}
	k.Seed[0] = seed
	return k
}

// startWith creates an agent in a cluster.
func startWith(t *testing.T, kubeconfig, dir string) (*Agent, *memoryDatapath) {
	t.Helper()
	a, dp, err := newInMemory(t, fmt.Sprintf("[kubernetes]\nkubeconfig = %q\n", kubeconfig), func(o *Options) {
		o.StateDir = dir
	})
	must.Do(t, err)
	t.Cleanup(a.close)
	return a, dp
}

// The datapath opens with the seed and the keys of the cluster, even if the API server does not answer but an earlier
// agent has read them.
func TestStartsWithTheKeysOfTheCluster(t *testing.T) {
	t.Parallel()
	dir, k := t.TempDir(), keysOf(7, "A")
	want := &datapath.TunnelKeys{Send: k.Current, Accept: [][]byte{k.Current, k.Next, k.Previous}, Required: true}
	a, dp := startWith(t, apiServer(t, keysInCluster(k)), dir)
	d := cmp.Diff(want, dp.options.TunnelKeys)
	must.True(t, d == "" && dp.options.HashSeed == k.Seed, "seed %x, -want +got:\n%s", dp.options.HashSeed, d)
	must.Equal(t, nil, lbtest.Texts(a.keys.findings()))
	info, err := os.Stat(filepath.Join(dir, "tunnel-keys.json"))
	must.Need(t, err == nil && info.Mode() == 0o600, "file %v, %v; want one for root only", info, err)
	gone := httptest.NewServer(http.NotFoundHandler())
	kubeconfig := kubeconfigOf(t, gone.URL)
	gone.Close()
	a, dp = startWith(t, kubeconfig, dir)
	must.Equal(t, want, dp.options.TunnelKeys)
	must.Equal(t, k.Seed, dp.options.HashSeed)
	p := lbtest.Texts(a.keys.findings())
	must.True(t, len(p) == 1, "problems %q", p)
}

// An agent that may not read the Secret starts, keeps what an earlier one has set, and says so in its status.
func TestStartsWithoutPermissionForKeys(t *testing.T) {
	refused := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Type", "application/json")
		w.WriteHeader(http.StatusForbidden)
		fmt.Fprint(w, `{"kind":"Status","apiVersion":"v1","status":"Failure","reason":"Forbidden",`+
			`"message":"secrets is forbidden","code":403}`)
	}))
	defer refused.Close()
	dir := t.TempDir()
	if err := os.WriteFile(filepath.Join(dir, "tunnel-keys.json"), []byte("{}"), 0o600); err != nil { // without keys
		t.Fatal(err)
	}
	start := time.Now()
	a, dp := startWith(t, kubeconfigOf(t, refused.URL), dir)
	must.True(t, dp.options.TunnelKeys == nil && dp.options.HashSeed == [32]byte{} &&
		time.Since(start) <= firstKeysTimeout, "options %+v after %s", dp.options, time.Since(start))
	d := describer{reloader: a.reloader, findings: []func() []lb.Finding{a.keys.findings}, datapath: dp}
	const problem = "tunnel keys of the cluster: secrets is forbidden"
	w := strings.Join(lbtest.Texts(d.info().Findings), "\n")
	must.True(t, strings.Contains(w, problem), "findings:\n%s", w)
}

// A change of the keys is followed. Another seed takes effect at the next start, and the status says so.
func TestFollowsTheKeysOfTheCluster(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	a, dp := startWith(t, apiServer(t, keysInCluster(keysOf(7, "A"))), dir)
	now := apiServer(t, keysInCluster(keysOf(8, "B")))
	client := must.Get(newClient(now, "", 0, nil))(t)
	o := kube.KeyOptions{Client: client, Namespace: defaultNamespace, Log: discard}
	a.keys.keeper = kube.NewKeyKeeper(o, a.keys.known)
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- a.keys.task(dp.SetTunnelKeys).run(ctx) }()
	eventually(t, "the new keys", func() bool {
		k := dp.keys.Load()
		return k != nil && string(k.Send) == "the current key B"
	})
	eventually(t, "a problem in the status", func() bool {
		return strings.Contains(strings.Join(lbtest.Texts(a.keys.findings()), "\n"), "hash seed differs")
	})
	cancel()
	if err := <-done; err != nil && !errors.Is(err, context.Canceled) {
		t.Error(err)
	}
	if stored, err := a.keys.load(); err != nil || stored.Seed[0] != 8 || dp.options.HashSeed[0] != 7 {
		t.Errorf("stored %+v, %v; want seed 8; active seed %x, want 7", stored, err, dp.options.HashSeed)
	}
}

// Changes made while the agent was not running are active when the datapath opens. The agent reads them only through
// its watch.
func TestStartsWithChangedKeys(t *testing.T) {
	dir := t.TempDir()
	startWith(t, apiServer(t, keysInCluster(keysOf(7, "A"))), dir)
	now := keysInCluster(keysOf(8, "B"))
	delete(now, "/api/v1/namespaces/"+defaultNamespace+"/secrets/"+kube.KeySecret) // it is not read
	a, dp := startWith(t, apiServer(t, now), dir)
	if k := dp.options.TunnelKeys; k == nil || string(k.Send) != "the current key B" || dp.options.HashSeed[0] != 8 {
		t.Errorf("keys %+v, seed %x; want the current key B and seed 8", k, dp.options.HashSeed)
	}
	must.Equal(t, nil, lbtest.Texts(a.keys.findings()))
}

func TestKeysOfAFileNeedNoSecret(t *testing.T) {
	cfg := parse(t, keyed(t, t.TempDir(), keyA)+"[kubernetes]\nkubeconfig = \"/no/such/file\"\n")
	c, err := openClusterKeys(Options{Config: cfg, Log: discard})
	must.True(t, c == nil && err == nil, "%+v, %v; want none", c, err)
	must.Equal(t, nil, lbtest.Texts((*clusterKeys)(nil).findings()))
}

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

// webInCluster returns the lists of a cluster with the node n and the Service web with the address 203.0.113.10.
func webInCluster() map[string]any {
	list := func(version, kind string) meta.TypeMeta { return meta.TypeMeta{APIVersion: version, Kind: kind} }
	web := meta.ObjectMeta{Name: "web", Namespace: "default"}
	slice := web
	slice.Labels = map[string]string{discovery.LabelServiceName: "web"}
	name, port, protocol, ready := "", int32(8080), core.ProtocolTCP, true
	const table = "/api/v1/namespaces/" + defaultNamespace + "/configmaps" // empty
	return map[string]any{
		table: core.ConfigMapList{TypeMeta: list("v1", "ConfigMapList")},
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

// The source receives the reports of its prober, so an address is withheld until the service proxy has responded.
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

const keyA, keyB, keyC = "the key A of the tests", "the key B of the tests", "the key C of the tests"

// keyed returns a configuration whose tunnel key file has this text.
func keyed(t *testing.T, dir, text string) string {
	t.Helper()
	path := writeConfig(t, filepath.Join(dir, "tunnel.key"), text)
	return fmt.Sprintf("%s[datapath]\ntunnel_sources = [\"192.0.2.2\"]\ntunnel_key_file = %q\n", webTOML, path)
}

func sent(keys ...string) datapath.TunnelKeys {
	k := datapath.TunnelKeys{Send: []byte(keys[0]), Required: true}
	for _, x := range keys {
		k.Accept = append(k.Accept, []byte(x))
	}
	return k
}

func TestKeysAndSeedOfTheFile(t *testing.T) {
	none := parse(t, webTOML)
	if k := fileKeys(none); k == nil || !cmp.Equal(*k, datapath.TunnelKeys{}) || fileSeed(none) != [32]byte{} {
		t.Errorf("no file: keys %+v, seed %x; want empty keys and the constant seed", k, fileSeed(none))
	}
	none.Kubernetes = &config.Kubernetes{}
	k := fileKeys(none)
	must.True(t, k == nil, "a cluster without a file: %+v; want those of the Secret", k)
	two := parse(t, keyed(t, t.TempDir(), keyA+"\n"+keyB+"\nseed: 1234567890123456\n"))
	must.Equal(t, sent(keyA, keyB), *fileKeys(two))
	other := parse(t, keyed(t, t.TempDir(), keyC+"\nseed: 1234567890123456\n"))
	a, b := fileSeed(two), fileSeed(other)
	must.True(t, a == b && a != [32]byte{}, "seeds %x and %x; want one that does not follow from the keys", a, b)
}

// A rotation needs no restart: nodes first learn the next key, then send it, then forget the previous one.
func TestReloadRotatesTheKeys(t *testing.T) {
	dir, dp := t.TempDir(), newMemoryDatapath()
	var text bytes.Buffer
	l, _ := newTestReloader(t, new(slog.LevelVar), slog.New(slog.NewTextHandler(&text, nil)))
	l.running, l.setKeys = parse(t, keyed(t, dir, keyA)), dp.SetTunnelKeys
	for _, step := range [][]string{{keyA, keyB}, {keyB, keyA}, {keyB}} {
		file := ""
		for _, k := range step {
			file += k + "\n"
		}
		writeConfig(t, l.file, keyed(t, dir, file))
		done, err := l.reload("")
		must.Need(t, err == nil && len(done.NeedRestart) == 0, "%v, restart %q", err, done.NeedRestart)
		must.Equal(t, sent(step...), *dp.keys.Load())
	}
	for _, next := range []string{webTOML, keyed(t, dir, keyB+"\nseed: 1234567890123456\n")} {
		writeConfig(t, l.file, next)
		done, err := l.reload("")
		must.True(t, err == nil && slices.Equal(done.NeedRestart, []string{"datapath"}),
			"%v, restart %q; want datapath, for no keys and for another seed", err, done.NeedRestart)
	}
	must.Equal(t, sent(keyB), *dp.keys.Load())
	must.True(t, !bytes.Contains(text.Bytes(), []byte("key B")), "a key is in the log:\n%s", &text)
}
