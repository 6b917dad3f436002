package agent

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	core "k8s.io/api/core/v1"
	meta "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/steelyard-lb/steelyard/datapath"
	"github.com/steelyard-lb/steelyard/lb"
	"github.com/steelyard-lb/steelyard/lb/kube"
	"github.com/steelyard-lb/steelyard/lb/lbtest"
	"github.com/steelyard-lb/steelyard/lb/lbtest/must"
)

// keysInCluster is what an API server has whose Secret has these keys.
func keysInCluster(k kube.Keys) map[string]any {
	secret := core.Secret{
		TypeMeta:   meta.TypeMeta{APIVersion: "v1", Kind: "Secret"},
		ObjectMeta: meta.ObjectMeta{Name: kube.KeySecret, Namespace: defaultNamespace}, Data: k.Data(),
	}
	list := core.SecretList{
		TypeMeta: meta.TypeMeta{APIVersion: "v1", Kind: "SecretList"}, Items: []core.Secret{secret},
	}
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

// startWith creates an agent of a cluster.
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
	if d := cmp.Diff(want, dp.options.TunnelKeys); d != "" || dp.options.HashSeed != k.Seed {
		t.Errorf("seed %x, -want +got:\n%s", dp.options.HashSeed, d)
	}
	must.Equal(t, nil, lbtest.Texts(a.keys.findings()))
	info, err := os.Stat(filepath.Join(dir, "tunnel-keys.json"))
	if err != nil || info.Mode() != 0o600 {
		t.Fatalf("file %v, %v; want one for root only", info, err)
	}
	gone := httptest.NewServer(http.NotFoundHandler())
	kubeconfig := kubeconfigOf(t, gone.URL)
	gone.Close()
	a, dp = startWith(t, kubeconfig, dir)
	if d := cmp.Diff(want, dp.options.TunnelKeys); d != "" || dp.options.HashSeed != k.Seed {
		t.Errorf("without the API server: seed %x, -want +got:\n%s", dp.options.HashSeed, d)
	}
	if p := lbtest.Texts(a.keys.findings()); len(p) != 1 {
		t.Errorf("problems %q", p)
	}
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
	if err := os.WriteFile(filepath.Join(dir, "tunnel-keys.json"), []byte("{}"), 0o600); err != nil { // of no use
		t.Fatal(err)
	}
	start := time.Now()
	a, dp := startWith(t, kubeconfigOf(t, refused.URL), dir)
	if dp.options.TunnelKeys != nil || dp.options.HashSeed != [32]byte{} || time.Since(start) > firstKeysTimeout {
		t.Errorf("options %+v after %s", dp.options, time.Since(start))
	}
	d := describer{reloader: a.reloader, findings: []func() []lb.Finding{a.keys.findings}, datapath: dp}
	const problem = "tunnel keys of the cluster: secrets is forbidden"
	if w := strings.Join(lbtest.Texts(d.info().Findings), "\n"); !strings.Contains(w, problem) {
		t.Errorf("findings:\n%s", w)
	}
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
		return strings.Contains(strings.Join(lbtest.Texts(a.keys.findings()), "\n"), "another hash seed")
	})
	cancel()
	if err := <-done; err != nil && !errors.Is(err, context.Canceled) {
		t.Error(err)
	}
	if stored, err := a.keys.load(); err != nil || stored.Seed[0] != 8 || dp.options.HashSeed[0] != 7 {
		t.Errorf("stored %+v, %v; in force %x", stored, err, dp.options.HashSeed)
	}
}

// Changes made while the agent did not run are in force when the datapath opens, through a watch alone.
func TestStartsWithChangedKeys(t *testing.T) {
	dir := t.TempDir()
	startWith(t, apiServer(t, keysInCluster(keysOf(7, "A"))), dir)
	now := keysInCluster(keysOf(8, "B"))
	delete(now, "/api/v1/namespaces/"+defaultNamespace+"/secrets/"+kube.KeySecret) // it is not read
	a, dp := startWith(t, apiServer(t, now), dir)
	if k := dp.options.TunnelKeys; k == nil || string(k.Send) != "the current key B" || dp.options.HashSeed[0] != 8 {
		t.Errorf("keys %+v, seed %x", k, dp.options.HashSeed)
	}
	must.Equal(t, nil, lbtest.Texts(a.keys.findings()))
}

func TestKeysOfAFileNeedNoSecret(t *testing.T) {
	cfg := parse(t, keyed(t, t.TempDir(), keyA)+"[kubernetes]\nkubeconfig = \"/no/such/file\"\n")
	if c, err := openClusterKeys(Options{Config: cfg, Log: discard}); c != nil || err != nil {
		t.Errorf("%+v, %v; want none", c, err)
	}
	if p := lbtest.Texts((*clusterKeys)(nil).findings()); p != nil {
		t.Errorf("problems %q", p)
	}
}
