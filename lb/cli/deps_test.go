package cli

import (
	"encoding/json"
	"errors"
	"io"
	"os/exec"
	"slices"
	"strings"
	"testing"
)

const module = "github.com/steelyard-lb/steelyard/"

// TestImports holds the direction of the arrows: lb knows nobody, the parts know lb and never each other, and each
// outside library has one owner.
func TestImports(t *testing.T) {
	imports := listImports(t)
	for pkg, deps := range imports {
		for _, dep := range deps {
			if reason := forbidden(pkg, dep); reason != "" {
				t.Errorf("%s imports %s: %s", pkg, dep, reason)
			}
		}
	}
	for rule := range mayImport {
		if _, ok := imports[rule]; !ok {
			t.Errorf("the rule for %s is about a package that does not exist", rule)
		}
	}
}

// mayImport lists the packages of this module that a package may import; one not listed may import lb only.
var mayImport = map[string][]string{
	"":             {"lb/cli"},
	"lb":           {},
	"config":       {"lb"},
	"lb/file":      {"lb", "config"},
	"announce/bgp": {"lb", "announce"},
	"announce/l2":  {"lb", "announce"},
	"systemd":      {},
	"e2e/lab":      {},
}

// owners lists who may import an outside library, by prefix.
var owners = map[string][]string{
	"github.com/cilium/ebpf":         {"datapath"},
	"github.com/osrg/gobgp":          {"announce/bgp", "lb/cli/demo"},
	"github.com/mdlayher/":           {"announce/l2"},
	"github.com/BurntSushi/toml":     {"config"},
	"github.com/urfave/cli":          {"lb/cli"},
	"github.com/vishvananda/netlink": {"datapath", "announce/l2", "announce/bgp", "e2e/lab", "lb/cli"},
	"github.com/miekg/dns":           {"healthd"},
	"google.golang.org/grpc":         {"healthd"},
	"github.com/coreos/go-systemd":   {"systemd"},
	"k8s.io/":                        {"lb/kube", "lb/cli"},
}

func forbidden(pkg, dep string) string {
	if own, ok := strings.CutPrefix(dep, module); ok {
		if strings.HasPrefix(pkg, "lb/cli") || strings.HasPrefix(pkg, "e2e") && pkg != "e2e/lab" || strings.HasSuffix(own, "test") {
			return ""
		}
		allowed, ok := mayImport[pkg]
		if !ok {
			allowed = []string{"lb"}
		}
		if strings.HasPrefix(own, pkg+"/") || slices.Contains(allowed, own) {
			return ""
		}
		return "parts know lb and never each other"
	}
	if pkg == "lb" && strings.Contains(strings.Split(dep, "/")[0], ".") {
		return "lb is rules and vocabulary: standard library only"
	}
	for prefix, who := range owners {
		if strings.HasPrefix(dep, prefix) && !slices.ContainsFunc(who, func(w string) bool { return pkg == w || strings.HasPrefix(pkg, w+"/") }) {
			return "it belongs to " + strings.Join(who, ", ")
		}
	}
	return ""
}

// TestMainLinksNoTestPrograms: the product links the hosts and the traffic of the lab, which the demo needs, but nothing
// that runs routing daemons or Kubernetes programs.
func TestMainLinksNoTestPrograms(t *testing.T) {
	main := strings.TrimSuffix(module, "/")
	out, err := exec.Command("go", "list", "-deps", main).Output()
	if err != nil {
		t.Fatalf("go list -deps: %v", err)
	}
	deps := strings.Fields(string(out))
	if !slices.Contains(deps, module+"e2e/lab") {
		t.Fatalf("%s does not link e2e/lab: the rule tests nothing", main)
	}
	for _, dep := range deps {
		switch strings.TrimPrefix(dep, module) {
		case "e2e", "e2e/lab/peers", "e2e/lab/kube", "e2e/lab/labtest":
			t.Errorf("%s links %s: only tests need it", main, dep)
		}
	}
}

// listImports returns what each package of the module imports outside its tests, by path below the module.
func listImports(t *testing.T) map[string][]string {
	out, err := exec.Command("go", "list", "-json=ImportPath,Imports", module+"...").Output()
	if err != nil {
		t.Fatalf("go list: %v", err)
	}
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
