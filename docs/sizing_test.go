package docs

import (
	"fmt"
	"regexp"
	"strings"
	"testing"

	"github.com/steelyard-lb/steelyard/lb"
)

// The numbers that sizing.md takes from the code are those of the code.
func TestSizing(t *testing.T) {
	page := strings.Join(strings.Fields(read(t, "sizing.md")), " ")
	thousands := func(n string) string {
		return regexp.MustCompile(`(\d)(\d{3})$`).ReplaceAllString(n, "$1,$2")
	}
	for _, x := range []struct{ file, constant, text string }{
		{"../datapath/internal/table/services.go", `MaxFrontends = (\d+)`, "%s frontends"},
		{"../datapath/internal/table/services.go", `maxBackends = (\d+)`, "%s backends"},
		{"../datapath/bpf/maps.h", `BACKEND_CHUNK (\d+)`, "backends and frontends by %s"},
		{"../datapath/bpf/maps.h", `COUNTER_CHUNK (\d+)`, "backends and frontends by %s"},
		{"../lb/agent/memory.go", `collectorPercent = (\d+)`, "without `GOGC` the agent uses %s"},
		{"../lb/agent/kubernetes.go", `clientBurst = (\d+), \d+`, "at most %s requests a second"},
		{"../config/reference.toml", `max_flows = (\d+)`, "by default"},
	} {
		source := regexp.MustCompile(`\s+`).ReplaceAllString(read(t, x.file), " ")
		m := regexp.MustCompile(x.constant).FindStringSubmatch(source)
		if m == nil {
			t.Errorf("%s has no %s", x.file, x.constant)
			continue
		}
		want := x.text
		if strings.Contains(x.text, "%s") {
			want = fmt.Sprintf(x.text, thousands(m[1]))
		}
		if !strings.Contains(page, want) {
			t.Errorf("sizing.md lacks %q", want)
		}
	}
	var sizes []string
	for n := 10; n < 1000; n *= 2 {
		if size := fmt.Sprint(lb.TableSize(n)); len(sizes) == 0 || sizes[len(sizes)-1] != size {
			sizes = append(sizes, size)
		}
	}
	last := len(sizes) - 1
	if want := strings.Join(sizes[:last], ", ") + " and " + sizes[last]; !strings.Contains(page, want) {
		t.Errorf("sizing.md lacks %q", want)
	}
	if !strings.Contains(read(t, "../datapath/memory_test.go"), "func BenchmarkMemory(") {
		t.Error("the benchmark that sizing.md names does not exist")
	}
}
