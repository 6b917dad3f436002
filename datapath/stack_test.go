package datapath

import (
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/cilium/ebpf"

	"github.com/steelyard-lb/steelyard/e2e/lab/labtest"
)

// The verifier allows 512 bytes of stack for a program and the functions that it calls, which call no others with a
// stack of their own. It rounds each up to 32 bytes. Some must stay free: a small change should not be at the limit.
func TestStackHasRoom(t *testing.T) {
	labtest.Root(t)
	const limit, room = 512, 48
	spec, err := loadSy()
	if err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{"tunnel_decap", "local_delivery", "no_xdp_tx"} { // all branches
		if err := spec.Variables[name].Set(uint8(1)); err != nil {
			t.Fatal(err)
		}
	}
	for _, m := range spec.Maps {
		m.MaxEntries = min(m.MaxEntries, 1024)
	}
	c, err := ebpf.NewCollectionWithOptions(spec, ebpf.CollectionOptions{
		Programs: ebpf.ProgramOptions{LogLevel: ebpf.LogLevelStats},
	})
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	depths := regexp.MustCompile(`stack depth ([0-9+]+)`)
	for name, prog := range c.Programs {
		found := depths.FindStringSubmatch(prog.VerifierLog)
		if found == nil {
			t.Fatalf("%s: no stack depth in %q", name, prog.VerifierLog)
		}
		var frames []int
		for text := range strings.SplitSeq(found[1], "+") {
			n, err := strconv.Atoi(text)
			if err != nil {
				t.Fatal(err)
			}
			frames = append(frames, max(32, (n+31)/32*32))
		}
		deepest := frames[0]
		if len(frames) > 1 {
			deepest += slices.Max(frames[1:])
		}
		t.Logf("%s: %s, at most %d", name, found[1], deepest)
		if deepest > limit-room {
			t.Errorf("%s: %d bytes of stack; want at most %d", name, deepest, limit-room)
		}
	}
}
