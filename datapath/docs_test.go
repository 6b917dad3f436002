package datapath

import (
	"flag"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/btf"
	"github.com/steelyard-lb/steelyard/datapath/internal/bpf"
	"github.com/steelyard-lb/steelyard/lb/lbtest/must"
)

const datapathPage = "../docs/datapath.md"

// docs/datapath.md lists the programs and maps in the embedded object. Their meanings are the comments in bpf/.
func TestProgramsAndMapsAreDocumented(t *testing.T) {
	t.Parallel()
	spec := must.Get(bpf.LoadSy())(t)
	meanings := readMeanings(t)
	var page strings.Builder
	page.WriteString("# Programs and maps of the datapath\n\n" +
		"These are the names in `bpftool prog` and `bpftool map`. This page is generated " +
		"from the embedded object and the comments in `datapath/bpf`. During `steelyard trace`, other programs have " +
		"the names of those on interfaces, and there are maps with the prefix `sy_trace`.\n\n" +
		"| program | type | meaning |\n|---|---|---|\n")
	for _, name := range slices.Sorted(maps.Keys(spec.Programs)) {
		fmt.Fprintf(&page, "| `%s` | %s | %s |\n", name, spec.Programs[name].Type, meanings[name])
	}
	page.WriteString("\n`max_flows` means that the size depends on this option.\n\n" +
		"| map | type | key | value | max entries | meaning |\n|---|---|---|---|---|---|\n")
	for _, name := range slices.Sorted(maps.Keys(spec.Maps)) {
		if strings.HasPrefix(name, ".") { // sections of constants
			continue
		}
		m := spec.Maps[name]
		size := fmt.Sprint(m.MaxEntries)
		if _, ok := tableSizes(1)[name]; ok {
			size = "`max_flows`"
		}
		fmt.Fprintf(&page, "| `%s` | %s | %s | %s | %s | %s |\n", name, m.Type, typeName(m.Key, m.KeySize),
			valueName(m), size, meanings[name])
	}
	for name := range spec.Maps {
		if says, ok := meanings[name]; !ok && !strings.HasPrefix(name, ".") {
			t.Errorf("the definition of map %s is not found in bpf/", name)
		} else if says == "" && !strings.HasPrefix(name, ".") {
			t.Errorf("map %s has no comment in bpf/", name)
		}
	}
	for name := range spec.Programs {
		_, ok := meanings[name]
		must.True(t, ok, "the definition of program %s is not found in bpf/", name)
	}
	checkPage(t, datapathPage, page.String())
}

func valueName(m *ebpf.MapSpec) string {
	switch {
	case m.Type == ebpf.ProgramArray:
		return "program"
	case m.InnerMap != nil:
		return fmt.Sprintf("%s of %s", m.InnerMap.Type, typeName(m.InnerMap.Value, m.InnerMap.ValueSize))
	}
	return typeName(m.Value, m.ValueSize)
}

func typeName(t btf.Type, size uint32) string {
	if t == nil || t.TypeName() == "" {
		return fmt.Sprintf("%d bytes", size)
	}
	return "`" + t.TypeName() + "`"
}

var (
	mapEnd     = regexp.MustCompile(`(?m)[})] (\w+) SEC\("\.maps"\);`)
	program    = regexp.MustCompile(`(?m)^SEC\("[\w/]+"\)\nint (\w+)\(`)
	comment    = regexp.MustCompile(`(?s)^/\*(.+?)\*/\n`)
	commentEnd = regexp.MustCompile(`\s*\n \* ?`)
	sentence   = regexp.MustCompile(`^(.+?\.)( |$)`)
)

// readMeanings returns the first sentence of the comment above each program and map in the C code.
func readMeanings(t *testing.T) map[string]string {
	t.Helper()
	files, err := filepath.Glob("bpf/*.[ch]")
	must.Need(t, err == nil && len(files) > 0, "no C files: %v", err)
	meanings := map[string]string{}
	for _, path := range files {
		if strings.HasSuffix(path, "trace.bpf.c") { // their programs have the same names
			continue
		}
		text := must.Get(os.ReadFile(path))(t)
		for block := range strings.SplitSeq(string(text), "\n\n") {
			block = strings.TrimLeft(block, "\n")
			c := comment.FindStringSubmatch(block)
			says := ""
			if c != nil {
				says = strings.TrimSpace(commentEnd.ReplaceAllString(c[1], " "))
				if s := sentence.FindStringSubmatch(says); s != nil {
					says = s[1]
				}
				says = strings.ReplaceAll(strings.TrimSuffix(says, "."), "|", "\\|")
				block = block[len(c[0]):]
			}
			switch m, p := mapEnd.FindStringSubmatch(block), program.FindStringSubmatch(block); {
			case m != nil:
				meanings[m[1]] = says
			case p != nil:
				meanings[p[1]] = says
			}
		}
	}
	return meanings
}

// checkPage compares a generated page with the file. With -update it writes the file.
func checkPage(t *testing.T, path, want string) {
	t.Helper()
	if *update {
		must.Do(t, os.WriteFile(path, []byte(want), 0o644))
	}
	if have, err := os.ReadFile(path); err != nil || string(have) != want {
		t.Errorf("%s is not up to date (%v); run go test ./datapath -run Documented -update", filepath.Base(path), err)
	}
}

var update = flag.Bool("update", false, "rewrite the generated pages in docs")

const reasonsPage = "../docs/reasons.md"

// docs/reasons.md lists every reason with the comment of enum reason (bpf/types.h).
func TestReasonsAreDocumented(t *testing.T) {
	var page strings.Builder
	page.WriteString("# Reasons\n\n" +
		"This page lists the values of the label `reason` of `steelyard_datapath_packets_total` (packets to or " +
		"from a VIP)\nand `steelyard_proxy_rejected_packets_total`, which `steelyard explain` prints as well.\n\n" +
		"| reason | who must act | meaning and remedy |\n|---|---|---|\n")
	names := map[string]bool{"none": true, "not_ours": true, "max": true}
	for _, r := range Reasons() {
		if r.Name == "not_ours" {
			continue
		}
		names[r.Name] = true
		fmt.Fprintf(&page, "| `%s` | %s | %s |\n", r.Name, r.Who, r.Text)
	}
	all := must.Get(bpf.ReadNames(must.Get(bpf.LoadSy())(t)))(t)
	for _, name := range all.Reasons {
		must.True(t, names[name], "the comment of reason %q in bpf/types.h does not say who must act", name)
	}
	checkPage(t, reasonsPage, page.String())
}
