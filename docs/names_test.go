package docs

import (
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/steelyard-lb/steelyard/lb"
	"github.com/steelyard-lb/steelyard/lb/lbtest/must"
)

var (
	code      = regexp.MustCompile("`([^`\n]+)`")
	fence     = regexp.MustCompile("(?ms)^```.*?^```")
	filePath  = regexp.MustCompile(`^(?:[\w.*-]+/)*[\w*-]+\.(?:go|h|sh|toml|md|o|\*)$`)
	directory = regexp.MustCompile(`^(?:lb|datapath|announce|healthd|config|e2e|docs|systemd|\.ci)(?:/\w+)*$`)
	testName  = regexp.MustCompile(`\b(?:Test|Fuzz)[A-Z]\w*`)
	link      = regexp.MustCompile(`\]\(([^)#:]*)(?:#([^)]*))?\)`)
	heading   = regexp.MustCompile(`(?m)^#+ (.*)$`)
	notInLink = regexp.MustCompile(`[^\w\- ]`)
)

// pages returns the repository's pages by path, without code blocks.
func pages(t *testing.T) map[string]string {
	t.Helper()
	all := map[string]string{}
	for _, pattern := range []string{"*.md", "development/*.md", "../*.md"} {
		paths, err := filepath.Glob(pattern)
		must.Need(t, err == nil && len(paths) != 0, "%s: %d pages, %v", pattern, len(paths), err)
		for _, path := range paths {
			all[path] = fence.ReplaceAllString(read(t, path), "")
		}
	}
	return all
}

func read(t *testing.T, path string) string {
	t.Helper()
	return string(must.Get(os.ReadFile(path))(t))
}

// Files and directories named on pages for developers exist. A name without a directory is in the root or datapath/bpf.
func TestNamedFilesExist(t *testing.T) {
	named := 0
	for _, page := range []string{"development/architecture.md", "../CONTRIBUTING.md"} {
		for _, m := range code.FindAllStringSubmatch(pages(t)[page], -1) {
			name := m[1]
			if !filePath.MatchString(name) && !directory.MatchString(name) {
				continue
			}
			named++
			places := []string{filepath.Join("..", name)}
			if !strings.Contains(name, "/") {
				places = append(places, filepath.Join("../datapath/bpf", name))
			}
			if !slices.ContainsFunc(places, exists) && name != "doc.go" { // every package has one
				t.Errorf("%s names %s, which does not exist", page, name)
			}
		}
	}
	must.True(t, named >= 50, "found only %d names of files: the pages or this test have changed", named)
}

func exists(pattern string) bool {
	found, err := filepath.Glob(pattern)
	return err == nil && len(found) > 0
}

// Links lead to existing files and headings.
func TestLinksLeadSomewhere(t *testing.T) {
	for page, text := range pages(t) {
		for _, m := range link.FindAllStringSubmatch(text, -1) {
			to := page
			if m[1] != "" {
				to = filepath.Join(filepath.Dir(page), m[1])
			}
			switch {
			case !exists(to):
				t.Errorf("%s links to %s, which does not exist", page, m[1])
			case m[2] != "" && !slices.Contains(anchors(read(t, to)), m[2]):
				t.Errorf("%s links to %s#%s; there is no such heading", page, m[1], m[2])
			}
		}
	}
}

// anchors returns the anchors that GitHub generates for a page's headings.
func anchors(page string) (names []string) {
	for _, m := range heading.FindAllStringSubmatch(fence.ReplaceAllString(page, ""), -1) {
		names = append(names, strings.ReplaceAll(notInLink.ReplaceAllString(strings.ToLower(m[1]), ""), " ", "-"))
	}
	return names
}

// Every page is reachable from README.md.
func TestREADMELinksToEveryPage(t *testing.T) {
	readme := pages(t)["../README.md"]
	for page := range pages(t) {
		path := filepath.Join("docs", page)
		if path != "README.md" && !strings.Contains(readme, "]("+path+")") {
			t.Errorf("README.md does not link to %s", path)
		}
	}
}

func TestNamedTestsExist(t *testing.T) {
	var tests strings.Builder
	must.Do(t, filepath.WalkDir("..", func(path string, _ os.DirEntry, err error) error {
		if err == nil && strings.HasSuffix(path, "_test.go") {
			tests.WriteString(read(t, path))
		}
		return err
	}))
	named := pages(t)
	named["../e2e/kernels/tests"] = read(t, "../e2e/kernels/tests") // a name that matches no test would run nothing
	for page, text := range named {
		for _, name := range testName.FindAllString(text, -1) {
			must.True(t, strings.Contains(tests.String(), "func "+name+"("),
				"%s names %s, which is not a test", page, name)
		}
	}
}

// The page lists every kind of finding.
func TestFindingsAreDocumented(t *testing.T) {
	var page strings.Builder
	page.WriteString("# Findings\n\n" +
		"This page lists the findings that `steelyard status` and, from `mtu` on, `steelyard doctor` can\n" +
		"report. Each has a code, a severity, a description with the object and the cause, and a remedy.\n" +
		"The verdict is `DOWN` if any finding has\n" +
		"severity `down`, `DEGRADED` if any has severity `degraded`, and `OK` otherwise. The log reports each\n" +
		"change of the verdict as `verdict changed`, and `steelyard_findings{code,severity}` counts the findings.\n\n" +
		"| code | severity | meaning | remedy |\n|---|---|---|---|\n")
	for _, k := range lb.FindingKinds {
		fmt.Fprintf(&page, "| `%s` | %s | %s | %s |\n", k.Code, k.Severity, k.Meaning, k.Remedy)
	}
	if *update {
		must.Do(t, os.WriteFile("findings.md", []byte(page.String()), 0o644))
	}
	must.Equal(t, page.String(), string(must.Get(os.ReadFile("findings.md"))(t)))
}

// The page contains config/reference.toml unchanged.
func TestReferenceIsDocumentedWhole(t *testing.T) {
	page := "# Every key\n\n" +
		"[Configuration](configuration.md) describes how to use these keys.\n\n" +
		"```toml\n" + read(t, "../config/reference.toml") + "```\n"
	if *update {
		must.Do(t, os.WriteFile("reference.md", []byte(page), 0o644))
	}
	must.Equal(t, page, string(must.Get(os.ReadFile("reference.md"))(t)))
}

// generated pages are exempt from limits, because they are as long as the code that they show.
var generated = []string{"datapath.md", "findings.md", "metrics.md", "reasons.md", "reference.md"}

// Nobody reads longer texts: README is one screen, the changelog one page, and a page takes a few minutes.
func TestWords(t *testing.T) {
	limits := map[string]int{"../README.md": 700, "../CHANGELOG.md": 600}
	sum := 0
	for _, pattern := range []string{"*.md", "development/*.md"} {
		paths, err := filepath.Glob(pattern)
		must.Need(t, err == nil && len(paths) != 0, "%s: %d pages, %v", pattern, len(paths), err)
		for _, path := range paths {
			if !slices.Contains(generated, path) {
				limits[path] = 1500
				sum += len(strings.Fields(read(t, path)))
			}
		}
	}
	for path, limit := range limits {
		n := len(strings.Fields(read(t, path)))
		must.True(t, n <= limit, "%s has %d words; the limit is %d", path, n, limit)
	}
	limit := 24_800
	must.True(t, sum <= limit, "docs has %d words without generated pages; the limit is %d", sum, limit)
}

// Numbers that sizing.md takes from the code match the code.
func TestSizing(t *testing.T) {
	page := strings.Join(strings.Fields(read(t, "sizing.md")), " ")
	thousands := func(n string) string { return regexp.MustCompile(`(\d)(\d{3})$`).ReplaceAllString(n, "$1,$2") }
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
		must.True(t, strings.Contains(page, want), "sizing.md lacks %q", want)
	}
	var sizes []string
	for n := 10; n < 1000; n *= 2 {
		if size := fmt.Sprint(lb.TableSize(n)); len(sizes) == 0 || sizes[len(sizes)-1] != size {
			sizes = append(sizes, size)
		}
	}
	last := len(sizes) - 1
	want := strings.Join(sizes[:last], ", ") + " and " + sizes[last]
	must.True(t, strings.Contains(page, want), "sizing.md lacks %q", want)
	must.True(t, strings.Contains(read(t, "../datapath/bench_test.go"), "func BenchmarkMemory("),
		"the benchmark that sizing.md names does not exist")
}

// Every key that migration.md names as the equivalent of another program's exists.
func TestKeysOfMigrationExist(t *testing.T) {
	header, assignment := regexp.MustCompile(`^\[+([\w.]+)\]+`), regexp.MustCompile(`^(\w+) *=`)
	section, known := "", map[string]bool{}
	for line := range strings.Lines(read(t, "../config/reference.toml")) {
		if m := header.FindStringSubmatch(line); m != nil {
			section = m[1]
			known[section] = true
		} else if m := assignment.FindStringSubmatch(line); m != nil {
			known[section+"."+m[1]] = true
		}
	}
	named := 0
	for line := range strings.Lines(read(t, "migration.md")) {
		cells := strings.Split(line, "|")
		if len(cells) != 4 {
			continue
		}
		for _, m := range code.FindAllStringSubmatch(cells[2], -1) {
			key, _, _ := strings.Cut(m[1], " ")
			if strings.Contains(key, "/") { // a label
				continue
			}
			named++
			must.True(t, known[key], "migration.md names %s, which is not in reference.toml", key)
		}
	}
	must.True(t, named >= 40, "found only %d keys: the page or this test has changed", named)
}
