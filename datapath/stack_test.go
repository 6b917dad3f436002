package datapath

import (
	"regexp"
	"strconv"
	"strings"
	"testing"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"

	"github.com/steelyard-lb/steelyard/datapath/internal/bpf"
	"github.com/steelyard-lb/steelyard/e2e/lab/labtest"
	"github.com/steelyard-lb/steelyard/lb/lbtest/must"
)

// The verifier allows 512 bytes of stack for a program and the functions that it calls, each rounded up to 32. Some
// must stay free, so that a small change does not reach the limit.
func TestStackHasRoom(t *testing.T) {
	t.Parallel()
	labtest.Root(t)
	const limit, room = 512, 48
	spec := must.Get(bpf.LoadSy())(t)
	for _, name := range []string{"tunnel_decap", "local_delivery", "no_xdp_tx"} { // enables all branches
		must.Do(t, spec.Variables[name].Set(uint8(1)))
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
	for name, prog := range c.Programs {
		used, path := deepest(t, spec.Programs[name].Instructions, prog.VerifierLog)
		t.Logf("%s: %d bytes: %s", name, used, path)
		must.True(t, used <= limit-room, "%s: %d bytes of stack in %s; want at most %d", name, used, path, limit-room)
	}
}

// deepest returns the stack size of a program's deepest chain of calls, given the verifier's log with the stack size of
// each function in the order of the instructions.
func deepest(t *testing.T, program asm.Instructions, log string) (bytes int, path string) {
	t.Helper()
	var functions []string
	calls := map[string]map[string]bool{}
	for i, ins := range program {
		if name := ins.Symbol(); name != "" {
			functions, calls[name] = append(functions, name), map[string]bool{}
			if last := program[max(0, i-1)].OpCode.JumpOp(); i > 0 && last != asm.Exit && last != asm.Ja {
				t.Errorf("the function before %s ends with %v, which Linux 6.1 rejects", name, program[i-1])
			}
		}
		if ins.IsFunctionCall() {
			calls[functions[len(functions)-1]][ins.Reference()] = true
		}
	}
	found := regexp.MustCompile(`stack depth ([0-9+]+)`).FindStringSubmatch(log)
	must.Need(t, found != nil, "no stack depth in %q", log)
	depths := strings.Split(found[1], "+")
	must.Need(t, len(depths) == len(functions),
		"the verifier has %d functions; want %d: %v", len(depths), len(functions), functions)
	frame := map[string]int{}
	for i, text := range depths {
		n := must.Get(strconv.Atoi(text))(t)
		frame[functions[i]] = max(32, (n+31)/32*32)
	}
	var below func(name string) (int, string)
	below = func(name string) (bytes int, path string) {
		for callee := range calls[name] {
			if n, p := below(callee); n > bytes {
				bytes, path = n, " > "+p
			}
		}
		return bytes + frame[name], name + path
	}
	return below(functions[0])
}
