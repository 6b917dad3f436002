package cluster

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/steelyard-lb/steelyard/e2e/lab"
	"github.com/steelyard-lb/steelyard/e2e/lab/kube"
	"github.com/steelyard-lb/steelyard/e2e/lab/labtest"
	"github.com/steelyard-lb/steelyard/lb/lbtest/must"
	meta "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// upstreamSubset are Kubernetes' tests that "make test-kubernetes" runs; "make conformance" runs all. It omits tests of
// rolling updates, which take more than ten minutes each.
var upstreamSubset = []string{
	"should be able to preserve UDP traffic when server pod cycles for a LoadBalancer service on the same nodes",
	"should have session affinity work for LoadBalancer service with Local traffic policy",
	"should only allow access from service loadbalancer source ranges",
	"should be able to change the type and ports of a TCP service",
	"should be able to preserve UDP traffic when server pod cycles for a LoadBalancer service on different nodes",
	"should be able to create LoadBalancer Service without NodePort and change it",
	"should handle load balancer cleanup finalizer for service",
	"should work for type=LoadBalancer",
	"should target all nodes with endpoints",
	"should only target nodes with endpoints",
}

// withoutProxySubset are those that "make test-kubernetes" runs without kube-proxy.
var withoutProxySubset = []string{
	"Services should be able to change the type from ExternalName to NodePort",
	"Services should have session affinity work for NodePort service [LinuxOnly]",
	"Services should be rejected when no endpoints exist",
	"Services should allow pods to hairpin back to themselves through services",
	"server pod cycles for a ClusterIP service and client is hostNetwork",
	"Networking Granular Checks: Services should function for node-Service: udp",
	"should work from pods",
}

// parallel is how many tests run concurrently; most of them wait most of the time.
const parallel = 6

// The directories of the programs of e2e/conformance and e2e/flannel.
const (
	upstreamDir = "../../.cache/conformance"
	flannelDir  = "../../.cache/flannel"
)

// TestUpstream runs Kubernetes' own tests ([sig-network]) from behind the router, against real kubelets with the agent
// as a DaemonSet. CONFORMANCE selects tests with a regular expression. With CONFORMANCE_WITHOUT_AGENT, the nodes have
// only kube-proxy. With CONFORMANCE_PROXY=replace they have only the agent.
func TestUpstream(t *testing.T) {
	t.Parallel()
	e := kube.Environment{Proxy: kube.NFTables}
	if os.Getenv("CONFORMANCE_PROXY") == "replace" {
		e.Proxy = ""
	}
	runUpstream(t, upstreamSubset, os.Getenv("CONFORMANCE"), e)
}

// TestUpstreamWithoutKubeProxy runs Kubernetes' own tests on nodes whose only service proxy is the agent.
func TestUpstreamWithoutKubeProxy(t *testing.T) {
	t.Parallel()
	runUpstream(t, withoutProxySubset, "", kube.Environment{})
}

// runUpstream runs the tests that focus selects, or the subset.
func runUpstream(t *testing.T, names []string, focus string, e kube.Environment) {
	t.Helper()
	nodes := 3
	if focus == "" {
		nodes = 2
	}
	u := startUpstream(t, nodes, os.Getenv("CONFORMANCE_WITHOUT_AGENT") == "", e)
	u.runAll(t, names, focus)
}

// upstreamPrograms returns the directory of the programs. Without them, it skips the test.
func upstreamPrograms(t *testing.T) string {
	t.Helper()
	programs := must.Get(filepath.Abs(upstreamDir))(t)
	if _, err := os.Stat(filepath.Join(programs, "e2e.test")); err != nil {
		err = fmt.Errorf("%w; build it with: make conformance-programs", err)
		if os.Getenv("STEELYARD_CI") != "" {
			t.Fatal(err)
		}
		t.Skip(err)
	}
	return programs
}

// runAll runs the tests that focus selects or, without it, those with these names.
func (u *upstream) runAll(t *testing.T, names []string, focus string) {
	t.Helper()
	subset := focus == ""
	if subset {
		var quoted []string
		for _, name := range names {
			quoted = append(quoted, regexp.QuoteMeta(name))
		}
		focus = strings.Join(quoted, "|")
	}
	specs := u.run(t, "--ginkgo.dry-run", "--ginkgo.focus="+focus)
	must.Need(t, !subset || len(specs) == len(names), "%d tests are selected; want %d", len(specs), len(names))
	alone := func(s spec) bool {
		return strings.Contains(s.name(), "[Serial]") || strings.Contains(s.name(), "[Disruptive]")
	}
	slots := make(chan struct{}, parallel)
	var all sync.WaitGroup
	for _, s := range specs {
		if !alone(s) {
			slots <- struct{}{}
			all.Go(func() {
				defer func() { <-slots }()
				u.runOne(t, s)
			})
		}
	}
	all.Wait()
	for _, s := range specs {
		if alone(s) {
			u.runOne(t, s)
		}
	}
	u.report(t, subset)
}

// upstream is a cluster for Kubernetes' tests.
type upstream struct {
	*cluster
	programs string
	dir      string // directory of the tests' files

	mu      sync.Mutex // guards results
	results []result
}

type result struct {
	spec
	output string // the last lines, if the test failed
}

// spec is a test in ginkgo's reports.
type spec struct {
	ContainerHierarchyTexts []string
	LeafNodeText            string
	LeafNodeType            string
	State                   string
	RunTime                 time.Duration
	Failure                 struct{ Message string }
}

// name returns the full name, by which ginkgo selects tests.
func (s spec) name() string {
	return strings.Join(append(s.ContainerHierarchyTexts, s.LeafNodeText), " ")
}

// startUpstream starts a cluster whose pods have a network and a DNS server. With agent, it installs the DaemonSet, as
// the service proxy if the environment has none.
func startUpstream(t *testing.T, nodes int, agent bool, e kube.Environment) *upstream {
	t.Helper()
	programs := upstreamPrograms(t)
	must.Do(t, kube.RuntimeAvailable())
	u := &upstream{cluster: startCluster(t, nodes, "tunnel"), programs: programs, dir: t.TempDir()}
	u.environment = e
	must.Do(t, u.control.StartControllers("*"))
	u.serveNames(t)
	const conntrackServer = "regression-issue-74839"
	images := []kube.Image{agentsImage(), u.serverImage(t), {
		Names:    []string{"lab/" + conntrackServer + ":1.4"},
		Programs: []string{filepath.Join(programs, conntrackServer)},
	}}
	for i := range u.Balancers {
		u.startNode(t, i, images)
	}
	labtest.Until(t, "the nodes are ready", u.nodesReady)
	if agent {
		config := daemonConfig(u.Balancers[0])
		if e.Proxy == "" {
			server := netip.AddrPortFrom(u.control.Address, 6443)
			config = strings.Replace(config, "[kubernetes]\n",
				fmt.Sprintf("[kubernetes]\nproxy = \"replace\"\napi_servers = [%q]\n", server.String()), 1)
			config += "external_ips = true\n" // a test uses one that is in the pool
		}
		u.install(t, config)
		labtest.Until(t, "the DaemonSet is ready", u.daemonsReady(t))
	}
	return u
}

// startNode starts a node's kubelet, and its service proxy and flannel if the environment has them.
func (u *upstream) startNode(t *testing.T, i int, images []kube.Image) {
	t.Helper()
	n := u.Balancers[i]
	u.join(t, i)
	if u.environment.Proxy != "" {
		u.startProxy(t, n)
	}
	v4, v6 := podPrefixes(i)
	// The API server and the tests must also reach pods.
	router := u.Topology.Router
	must.Do(t, errors.Join(router.AddRoute(v4, n.V4), router.AddRoute(v6, n.V6)))
	kubelet := must.Get(u.control.StartKubelet(n, kube.Kubelet{
		Images: images, Pods: []netip.Prefix{v4, v6}, CNI: u.environment.CNI, DNS: u.Servers[0].V4,
		// A test expects health check node ports on every address of a Node, whatever the Service's family.
		OnlyIPv4: true,
	}))(t)
	t.Cleanup(func() {
		if t.Failed() {
			agent := u.daemonLog(n)
			t.Logf("log of the kubelet on %s:\n%s\nlog of the agent:\n%s", n, kubelet.Log.Tail(40), agent)
		}
	})
	if u.environment.CNI != kube.Flannel {
		return
	}
	labtest.Until(t, n.Name()+" is registered", func() error {
		_, err := u.api.CoreV1().Nodes().Get(t.Context(), n.Name(), meta.GetOptions{})
		return err
	})
	u.patchNode(t, i, fmt.Sprintf(`{"spec":{"podCIDR":%q,"podCIDRs":[%q,%q]}}`, v4, v4, v6))
	flannel := must.Get(u.control.StartFlannel(t.Context(), n, must.Get(filepath.Abs(flannelDir))(t)))(t)
	t.Cleanup(func() {
		if t.Failed() {
			t.Logf("log of flannel on %s:\n%s", n, flannel.Log.Tail(40))
		}
	})
}

// serverImage returns the image of Kubernetes' test server, with the programs that the tests run in its pods.
func (u *upstream) serverImage(t *testing.T) kube.Image {
	t.Helper()
	image := kube.Image{
		Programs: []string{filepath.Join(u.programs, "agnhost")},
		Files: map[string]string{
			"/etc/wgetrc":        "tries = 1\n", // not 20, where tests expect a single try
			"/etc/nsswitch.conf": "hosts: files dns\n",
			"/bin/nslookup":      "#!/bin/sh\nexec getent ahosts \"$1\"\n", // tests only check whether a name exists
		},
	}
	for _, name := range []string{
		"dash", "nc.openbsd", "wget", "curl", "cat", "date", "dd", "env", "getent", "grep", "head", "ls", "mkdir",
		"sed", "seq", "sleep", "sort", "tail", "timeout", "touch", "tr", "true", "uniq", "wc",
	} {
		program := must.Get(exec.LookPath(name))(t)
		image.Programs = append(image.Programs, program)
	}
	image.Names = []string{"lab/agnhost:2.55", "lab/agnhost:2.59", "lab/busybox:1.37.0-1"}
	image.Links = map[string]string{"/bin/sh": "dash", "/bin/nc": "nc.openbsd"}
	return image
}

// run runs e2e.test in the client's namespace and returns the tests that it did not skip by name.
func (u *upstream) run(t *testing.T, args ...string) []spec {
	specs, output, err := u.start(t, args...)
	must.Need(t, err == nil, "%v\n%s", err, output)
	return specs
}

func (u *upstream) start(t *testing.T, args ...string) (specs []spec, output string, err error) {
	dir, err := os.MkdirTemp(u.dir, "run-")
	if err != nil {
		return nil, "", err
	}
	report := filepath.Join(dir, "report.json")
	for name, text := range map[string]string{
		"kubeconfig": u.control.Kubeconfig(),
		// Other images are not needed, and could not be pulled from anywhere.
		"registries": "promoterE2eRegistry: lab\ngcRegistry: lab\n",
	} {
		if err := os.WriteFile(filepath.Join(dir, name), []byte(text), 0o600); err != nil {
			return nil, "", err
		}
	}
	var log bytes.Buffer
	p, err := u.Clients[0].Start(lab.Command{
		Path: filepath.Join(u.programs, "e2e.test"), Output: &log,
		// Some tests read image names before the flags are parsed.
		Env: []string{"KUBE_TEST_REPO_LIST=" + filepath.Join(dir, "registries")},
		Args: append([]string{
			"--kubeconfig=" + filepath.Join(dir, "kubeconfig"), "--provider=skeleton",
			fmt.Sprintf("--num-nodes=%d", len(u.Balancers)), "--kubectl-path=" + filepath.Join(u.programs, "kubectl"),
			"--e2e-output-dir=" + dir, "--disable-log-dump", "--ginkgo.no-color", "--ginkgo.timeout=2h",
			"--ginkgo.json-report=" + report,
		}, args...),
	})
	if err != nil {
		return nil, "", err
	}
	err = p.Wait(t.Context())
	if b, errRead := os.ReadFile(report); errRead == nil {
		var suites []struct{ SpecReports []spec }
		if errJSON := json.Unmarshal(b, &suites); errJSON != nil {
			return nil, log.String(), errJSON
		}
		for _, suite := range suites {
			specs = append(specs, suite.SpecReports...)
		}
	}
	// Tests outside the focus are also reported as skipped, but without a reason.
	specs = slices.DeleteFunc(specs, func(s spec) bool {
		return s.LeafNodeType != "It" || s.State == "skipped" && s.Failure.Message == ""
	})
	if len(specs) == 0 && err == nil {
		err = fmt.Errorf("no test was selected")
	}
	return specs, log.String(), err
}

func (u *upstream) runOne(t *testing.T, s spec) {
	specs, output, err := u.start(t, "--ginkgo.focus="+regexp.QuoteMeta(s.name())+"$")
	r := result{spec: s}
	r.State, r.Failure.Message, r.output = "failed", fmt.Sprint(err), output
	if len(specs) == 1 {
		r.spec = specs[0]
	}
	u.mu.Lock()
	defer u.mu.Unlock()
	u.results = append(u.results, r)
	fmt.Fprintf(os.Stderr, "%-7s %6.1fs %s\n", r.State, r.RunTime.Seconds(), r.name())
}

// report makes each test a subtest. Tests in the subset must not be skipped.
func (u *upstream) report(t *testing.T, subset bool) {
	slices.SortFunc(u.results, func(a, b result) int { return strings.Compare(a.name(), b.name()) })
	for _, r := range u.results {
		t.Run(strings.ReplaceAll(r.name(), "/", "|"), func(t *testing.T) {
			switch r.State {
			case "passed":
			case "skipped":
				must.True(t, !subset, "a test of the subset was skipped: %s", r.Failure.Message)
				t.Skip(r.Failure.Message)
			default:
				t.Errorf("%s: %s\n%s", r.State, r.Failure.Message, tail(r.output, 60))
			}
		})
	}
}

func tail(text string, n int) string {
	lines := strings.Split(strings.TrimSpace(text), "\n")
	return strings.Join(lines[max(0, len(lines)-n):], "\n")
}
