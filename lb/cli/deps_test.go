package cli

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os/exec"
	"slices"
	"strings"
	"testing"

	"github.com/steelyard-lb/steelyard/lb/lbtest/must"
)

const module = "github.com/steelyard-lb/steelyard/"

// TestImports checks the direction of the imports: lb imports no other package, the components import lb and not each
// other, and only its owners import an outside library.
func TestImports(t *testing.T) {
	imports := listImports(t)
	for pkg, deps := range imports {
		for _, dep := range deps {
			must.Row(t, fmt.Sprintf("%s imports %s", pkg, dep), "", forbidden(pkg, dep))
		}
	}
	for rule := range mayImport {
		_, ok := imports[rule]
		must.True(t, ok, "the rule for %s is about a package that does not exist", rule)
	}
}

// mayImport lists the packages of this module that a package may import; an unlisted package may import only lb.
var mayImport = map[string][]string{
	"":                   {"lb/agent", "lb/cli", "lb/demo"},
	"lb":                 {},
	"config":             {"lb"},
	"lb/file":            {"lb", "config"},
	"lb/state":           {},
	"lb/httplimit":       {"lb"},
	"lb/printable":       {},
	"lb/events":          {"lb/printable"},
	"healthd":            {"lb", "lb/httplimit", "lb/printable"},
	"lb/admin":           {"lb", "lb/events", "lb/httplimit", "lb/printable"},
	"lb/kube":            {"lb", "lb/kube/proxy", "lb/printable"},
	"lb/logqueue":        {},
	"lb/doctor":          {"lb", "datapath/checksum"},
	"lb/agent/preflight": {"lb", "config", "lb/file", "healthd/program"},
	"lb/cli": {"lb", "lb/admin", "lb/capture", "lb/events", "lb/kube/metallb", "lb/printable", "config",
		"systemd"},
	"lb/demo":                  {"lb", "e2e/lab", "e2e/lab/traffic"},
	"announce/bfd":             {"lb", "announce/loglimit"},
	"announce/bgp":             {"lb", "announce", "announce/bfd", "announce/loglimit"},
	"announce/loglimit":        {},
	"announce/bgp/guard":       {"lb", "lb/printable"},
	"announce/bgp/routeradv":   {"lb"},
	"announce/l2":              {"lb", "announce", "announce/l2/members", "datapath/checksum", "datapath/netwatch"},
	"datapath":                 {"lb", "lb/state", "datapath/checksum"},
	"datapath/internal/bpf":    {},
	"datapath/internal/sysctl": {},
	"datapath/internal/pin":    {"lb/state"},
	"datapath/internal/route":  {"datapath/internal/bpf", "datapath/netwatch"},
	"datapath/internal/table":  {"lb", "datapath/internal/bpf", "datapath/internal/pin", "datapath/internal/route"},
	"datapath/internal/flow":   {"lb", "datapath/checksum", "datapath/internal/bpf", "datapath/internal/table"},
	"datapath/internal/hook": {"lb", "datapath/internal/bpf", "datapath/internal/sysctl", "datapath/internal/pin",
		"datapath/internal/route", "datapath/internal/table", "datapath/internal/flow"},
	"datapath/internal/verify": {"lb", "datapath/netwatch", "datapath/internal/bpf", "datapath/internal/route",
		"datapath/internal/table", "datapath/internal/flow", "datapath/internal/hook"},
	"datapath/internal/trace": {"datapath/internal/bpf", "datapath/internal/hook"},
	"datapath/inside": {"lb", "datapath/netwatch", "datapath/internal/bpf", "datapath/internal/sysctl",
		"datapath/internal/flow", "datapath/internal/hook", "datapath/internal/trace", "datapath/inside/internal/prog"},
	"datapath/inside/internal/prog": {},
	"datapath/checksum":             {},
	"datapath/netwatch":             {},
	"lb/agent/machine":              {"lb", "datapath/netwatch"},
	"datapath/dptest":               {"datapath/checksum"},
	"systemd":                       {},
	"e2e/lab":                       {},
	"e2e/lab/browser":               {},
	"e2e/lab/traffic":               {"e2e/lab"},
	"e2e/lab/peers":                 {"e2e/lab"},
	"e2e/lab/kube":                  {"e2e/lab"},
	"announce/l2/members":           {"lb", "lb/printable"},
}

// mayImportAll are the packages that connect the others, and the end-to-end tests.
var mayImportAll = []string{"lb/agent", "e2e", "e2e/bench", "e2e/bench/packets", "e2e/bench/connections",
	"e2e/bench/cluster", "e2e/bench/convergence", "e2e/bench/scale", "e2e/lab/labtest"}

// owners lists the packages that may import an external library, by prefix.
var owners = map[string][]string{
	"github.com/cilium/ebpf": {"datapath", "e2e/bench"},
	"github.com/osrg/gobgp":  {"announce/bgp", "lb/demo"},
	"github.com/mdlayher/": {"announce/l2", "announce/bgp/routeradv", "datapath", "e2e/lab", "lb/doctor",
		"lb/kube/proxy"},
	"github.com/google/nftables": {"datapath", "lb/kube/proxy"},
	"github.com/hashicorp/":      {"announce/l2/members"},
	"github.com/BurntSushi/toml": {"config"},
	"github.com/urfave/cli":      {"lb/cli"},
	"github.com/vishvananda/netlink": {"datapath", "announce/l2", "announce/bgp", "announce/bfd", "e2e/lab",
		"e2e/bench", "lb/agent", "lb/demo", "lb/doctor"},
	"github.com/miekg/dns":         {"healthd"},
	"google.golang.org/grpc":       {"healthd"},
	"github.com/coreos/go-systemd": {"systemd"},
	"k8s.io/":                      {"lb/kube", "lb/agent", "e2e/bench/cluster", "e2e/bench/connections"},
}

func forbidden(pkg, dep string) string {
	if own, ok := strings.CutPrefix(dep, module); ok {
		if slices.Contains(mayImportAll, pkg) || strings.HasSuffix(own, "test") {
			return ""
		}
		allowed, ok := mayImport[pkg]
		if !ok {
			allowed = []string{"lb"}
		}
		if strings.HasPrefix(own, pkg+"/") || slices.Contains(allowed, own) {
			return ""
		}
		return "components import lb and not each other"
	}
	if pkg == "lb" && strings.Contains(strings.Split(dep, "/")[0], ".") {
		return "lb imports the standard library only"
	}
	for prefix, who := range owners {
		owns := func(w string) bool { return pkg == w || strings.HasPrefix(pkg, w+"/") }
		if strings.HasPrefix(dep, prefix) && !slices.ContainsFunc(who, owns) {
			return "only these import it: " + strings.Join(who, ", ")
		}
	}
	return ""
}

// The product links the hosts and the traffic of the lab, which the demo needs, but nothing that runs routing daemons
// or Kubernetes programs.
func TestMainLinksNoTestPrograms(t *testing.T) {
	main := strings.TrimSuffix(module, "/")
	out := must.Get(exec.Command("go", "list", "-deps", main).Output())(t)
	deps := strings.Fields(string(out))
	must.Need(t, slices.Contains(deps, module+"e2e/lab"), "%s does not link e2e/lab", main)
	for _, dep := range deps {
		switch strings.TrimPrefix(dep, module) {
		case "e2e", "e2e/lab/peers", "e2e/lab/kube", "e2e/lab/labtest":
			t.Errorf("%s links %s: only tests need it", main, dep)
		}
	}
}

// TestClientLinksNoDatapath checks that the client commands need none of the agent's libraries, even through another
// package, so that they load fast and run without BPF or a cluster.
func TestClientLinksNoDatapath(t *testing.T) {
	for _, pkg := range []string{"lb/cli", "lb/admin", "config"} {
		out := must.Get(exec.Command("go", "list", "-deps", module+pkg).Output())(t)
		deps := strings.Fields(string(out))
		must.True(t, slices.Contains(deps, module+"lb"),
			"go list -deps %s does not list lb: the test sees nothing", pkg)
		for _, dep := range deps {
			for _, library := range []string{
				"github.com/cilium/ebpf", "github.com/osrg/gobgp", "github.com/vishvananda/netlink", "k8s.io/client-go",
			} {
				must.True(t, dep != library && !strings.HasPrefix(dep, library+"/"), "%s depends on %s", pkg, dep)
			}
		}
	}
}

// listImports returns what each package of the module imports outside its tests, by path below the module.
func listImports(t *testing.T) map[string][]string {
	out := must.Get(exec.Command("go", "list", "-json=ImportPath,Imports", module+"...").Output())(t)
	imports := map[string][]string{}
	for d := json.NewDecoder(strings.NewReader(string(out))); ; {
		var p struct {
			ImportPath string
			Imports    []string
		}
		if err := d.Decode(&p); errors.Is(err, io.EOF) {
			return imports
		} else if err != nil {
			t.Fatal(err)
		}
		imports[strings.TrimPrefix(strings.TrimPrefix(p.ImportPath, strings.TrimSuffix(module, "/")), "/")] = p.Imports
	}
}
