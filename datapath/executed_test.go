package datapath

import (
	"fmt"
	"maps"
	"math/rand/v2"
	"net/netip"
	"os"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"

	"github.com/steelyard-lb/steelyard/datapath/dptest"
	"github.com/steelyard-lb/steelyard/datapath/internal/bpf"
	"github.com/steelyard-lb/steelyard/datapath/internal/trace"
	"github.com/steelyard-lb/steelyard/e2e/lab/labtest"
	"github.com/steelyard-lb/steelyard/lb"
	"github.com/steelyard-lb/steelyard/lb/lbtest/must"
)

const executedFile = "testdata/executed.txt"

// instrumented is a copy of a program that uses the same maps. It records which helper calls it executes.
type instrumented struct {
	prog  *ebpf.Program
	calls []string  // helper of each call, with the type of the map in its first argument if known
	marks *ebpf.Map // a byte per call, nonzero once the call was executed
}

// instrument inserts a store to marks before each helper call. The result register is free there.
func instrument(t *testing.T, live *ebpf.Program, name string) *instrumented {
	t.Helper()
	spec := must.Get(bpf.LoadSy())(t)
	in := &instrumented{}
	p := spec.Programs[name]
	var out asm.Instructions
	for i, ins := range labelled(p.Instructions) {
		if ins.IsBuiltinCall() {
			mark := asm.LoadMapValue(asm.R0, 0, uint32(len(in.calls))).WithMetadata(ins.Metadata) // keeps its label
			out = append(out, mark.WithReference("sy_marks"), asm.StoreImm(asm.R0, 0, 1, asm.Byte))
			in.calls = append(in.calls, callName(spec, p.Instructions[:i], ins))
			ins.Metadata = asm.Metadata{}
		}
		out = append(out, ins)
	}
	p.Instructions = out
	spec.Programs = map[string]*ebpf.ProgramSpec{name: p}
	spec.Maps["sy_marks"] = &ebpf.MapSpec{Name: "sy_marks", Type: ebpf.Array, KeySize: 4,
		ValueSize: uint32(len(in.calls)), MaxEntries: 1}
	c, err := ebpf.NewCollectionWithOptions(spec, ebpf.CollectionOptions{MapReplacements: mapsOf(t, live, spec)})
	must.Need(t, err == nil, "load %s: %+v", name, err)
	t.Cleanup(c.Close)
	in.prog, in.marks = c.Programs[name], c.Maps["sy_marks"]
	return in
}

// labelled replaces jump offsets with labels, so that instructions can be inserted.
func labelled(in asm.Instructions) asm.Instructions {
	out := slices.Clone(in)
	at := map[asm.RawInstructionOffset]int{}
	for it := in.Iterate(); it.Next(); {
		at[it.Offset] = it.Index
	}
	for it := in.Iterate(); it.Next(); {
		op := it.Ins.OpCode
		if !op.Class().IsJump() || it.Ins.Reference() != "" || op.JumpOp() == asm.Call || op.JumpOp() == asm.Exit {
			continue
		}
		target := at[it.Offset+1+asm.RawInstructionOffset(it.Ins.Offset)]
		if out[target].Symbol() == "" {
			out[target] = out[target].WithSymbol(fmt.Sprintf("label%d", target))
		}
		out[it.Index] = out[it.Index].WithReference(out[target].Symbol())
		out[it.Index].Offset = -1
	}
	return out
}

// callName names a call by its helper and, for a lookup, the map's type.
func callName(spec *ebpf.CollectionSpec, before asm.Instructions, ins asm.Instruction) string {
	helper := strings.TrimPrefix(asm.BuiltinFunc(ins.Constant).String(), "Fn")
	if !strings.HasPrefix(helper, "Map") {
		return helper
	}
	for _, b := range slices.Backward(before[max(0, len(before)-20):]) {
		if b.Dst != asm.R1 || b.OpCode.Class() == asm.StXClass || b.OpCode.Class() == asm.StClass {
			continue
		}
		if m := spec.Maps[b.Reference()]; m != nil {
			return helper + " " + m.Type.String()
		}
		break
	}
	return helper
}

// mapsOf returns a loaded program's maps by their names in spec.
func mapsOf(t *testing.T, prog *ebpf.Program, spec *ebpf.CollectionSpec) map[string]*ebpf.Map {
	t.Helper()
	info := must.Get(prog.Info())(t)
	ids, _ := info.MapIDs()
	byName := map[string]*ebpf.Map{}
	for _, id := range ids {
		m := must.Get(ebpf.NewMapFromID(id))(t)
		t.Cleanup(func() { m.Close() })
		of := must.Get(m.Info())(t)
		byName[of.Name] = m
	}
	out := map[string]*ebpf.Map{}
	for name, of := range spec.Maps {
		const kernelNameLen = 15
		if m := byName[name[:min(len(name), kernelNameLen)]]; m != nil {
			of.MaxEntries = m.MaxEntries()
			out[name] = m
		}
	}
	return out
}

// least runs some packets and returns the calls of the packet with the fewest, because caches expire and a sample of
// packets refreshes entries. Each SYN belongs to a new flow.
func (fx *fixture) least(in *instrumented, prog string, packet func(*fixture) dptest.Packet) map[string]int {
	fx.t.Helper()
	var least map[string]int
	for i := range 64 { // flows differ, and some follow another one to the same next hop
		p := packet(fx)
		if p.Flags == dptest.SYN {
			p.Src = netip.AddrPortFrom(p.Src.Addr(), p.Src.Port()+uint16(i))
		}
		frame := p.Frame()
		context, verdicts := any(fx.skb(0)), hookTC.verdicts()
		if prog == "sy_xdp" {
			context, verdicts = fx.xdp(frame), hookXDP.verdicts()
		}
		n := in.run(fx, frame, context, verdicts)
		if least == nil || total(n) < total(least) {
			least = n
		}
	}
	return least
}

func total(calls map[string]int) (n int) {
	for _, k := range calls {
		n += k
	}
	return n
}

// run runs a packet and returns how many calls of each kind it executed. A call in a loop counts once.
func (in *instrumented) run(fx *fixture, frame []byte, context any, verdicts map[uint32]string) map[string]int {
	fx.t.Helper()
	must.Do(fx.t, in.marks.Put(uint32(0), make([]byte, len(in.calls))))
	fx.runProgram(in.prog, frame, context, verdicts)
	marks := make([]byte, len(in.calls))
	must.Do(fx.t, in.marks.Lookup(uint32(0), &marks))
	n := map[string]int{}
	for i, m := range marks {
		n[in.calls[i]] += int(m)
	}
	return n
}

// executedRows lists packets and the programs through which they are run.
var executedRows = []struct {
	name, prog string
	delivers   bool
	state      func(*fixture)
	in         func(*fixture) dptest.Packet
}{
	{"ipip", "sy_xdp", false, ipip, fromClientWith(dptest.ACK)},
	{"ipip, SYN", "sy_xdp", false, ipip, fromClientWith(dptest.SYN)},
	{"gue", "sy_xdp", false, gue, fromClientWith(dptest.ACK)},
	{"dsr", "sy_xdp", false, dsr, fromClientWith(dptest.ACK)},
	{"nat", "sy_xdp", false, knownFlow, fromClientWith(dptest.ACK)},
	{"nat, reply", "sy_xdp", false, knownFlow, func(fx *fixture) dptest.Packet { return fx.reply(dptest.ACK) }},
	{"nat, SYN", "sy_xdp", false, func(fx *fixture) { fx.service(lb.TCP, "b1", "b2") }, fromClientWith(dptest.SYN)},
	{"nat, SYN, ports exhausted", "sy_xdp", false, exhausted, fromClientWith(dptest.SYN)},
	{"nat", "sy_tc_in", false, knownFlow, fromClientWith(dptest.ACK)},
	{"to another node", "sy_xdp", true, func(fx *fixture) { fx.nodes(lb.TCP, "b2") }, fromClientWith(dptest.ACK)},
	{"to a backend here", "sy_xdp", true, delivered, fromClientWith(dptest.ACK)},
	{"to a backend here", "sy_tc_in", true, delivered, fromClientWith(dptest.ACK)},
	{"from a backend here", "sy_tc_out", true, delivered, func(fx *fixture) dptest.Packet {
		return dptest.Packet{Src: fx.at("b1", 8080), Dst: fx.at("client", 40000), Proto: dptest.TCP, Flags: dptest.ACK}
	}},
	{"to this node", "sy_xdp", true, delivered, toSelf},
	{"to this node", "sy_tc_in", true, delivered, toSelf},
	{"from this node", "sy_tc_out", true, delivered, fromSelf},
	{"from this node, one of a spread service", "sy_tc_out", true, func(fx *fixture) {
		fx.nodes(lb.TCP, "self", "b2")
	}, fromSelf},
}

func fromClientWith(flags uint8) func(*fixture) dptest.Packet {
	return func(fx *fixture) dptest.Packet { return fx.fromClient(dptest.TCP, flags) }
}

func toSelf(fx *fixture) dptest.Packet {
	p := fx.fromClient(dptest.TCP, dptest.ACK)
	p.Dst = fx.at("self", 22)
	return p
}

func fromSelf(fx *fixture) dptest.Packet {
	return dptest.Packet{Src: fx.at("self", 22), Dst: fx.at("client", 40000), Proto: dptest.TCP, Flags: dptest.ACK}
}

// knownFlow opens fromClient's NAT flow.
func knownFlow(fx *fixture) {
	fx.service(lb.TCP, "b1", "b2")
	fx.run(fx.fromClient(dptest.TCP, dptest.SYN).Frame())
	fx.run(fx.reply(dptest.SYN | dptest.ACK).Frame())
	fx.run(fx.fromClient(dptest.TCP, dptest.ACK).Frame())
}

// exhausted uses up all source ports to the server with other clients' half-open flows.
func exhausted(fx *fixture) {
	fx.service(lb.TCP, "b1")
	fx.runMany(fx.invented(rand.New(rand.NewPCG(1, 28)), 40_000, dptest.TCP, dptest.SYN))
}

// delivered opens fromClient's flow to b1 on this node.
func delivered(fx *fixture) {
	fx.deliver(func(*lb.Service) {})
	fx.run(fx.fromClient(dptest.TCP, dptest.SYN).Frame())
	fx.out(dptest.Packet{Src: fx.at("b1", 8080), Dst: fx.at("client", 40000), Proto: dptest.TCP,
		Flags: dptest.SYN | dptest.ACK, Seq: 5000})
	fx.run(fx.fromClient(dptest.TCP, dptest.ACK).Frame())
}

// Neither the number of helper calls per packet (mostly map lookups) nor the size of the programs grows.
// testdata/executed.txt has the limits; -update writes the current values.
func TestExecutedWork(t *testing.T) {
	t.Parallel()
	labtest.Root(t)
	spec := must.Get(bpf.LoadSy())(t)
	work := map[string]map[string]int{}
	for name, p := range spec.Programs {
		work[name] = map[string]int{"instructions": int(p.Instructions.Size() / asm.InstructionSize)}
	}
	fixtures := map[bool]*fixture{}
	programs := map[string]*instrumented{}
	for _, delivers := range []bool{false, true} {
		fx := newFixture(t, hookXDP, false, func(o *Options) { o.Delivers = delivers })
		fixtures[delivers] = fx
		o := fx.d.objects
		for name, p := range map[string]*ebpf.Program{"sy_xdp": o.SyXdp, "sy_tc_in": o.SyTcIn, "sy_tc_out": o.SyTcOut} {
			programs[fmt.Sprint(name, delivers)] = instrument(t, p, name)
		}
	}
	for _, r := range executedRows {
		fx := fixtures[r.delivers]
		fx.reset()
		r.state(fx)
		work[r.prog+", "+r.name] = fx.least(programs[fmt.Sprint(r.prog, r.delivers)], r.prog, r.in)
	}
	if *update {
		must.Do(t, os.WriteFile(executedFile, []byte(formatWork(work)), 0o644))
	}
	limits := readWork(t)
	for row, calls := range work {
		for what, n := range calls {
			if limit := limits[row][what]; n > limit {
				t.Errorf("%s: %s: %d, more than %d; if intended, run go test ./datapath -run ExecutedWork -update",
					row, what, n, limit)
			}
		}
	}
}

func formatWork(work map[string]map[string]int) string {
	var text strings.Builder
	text.WriteString("# What a packet of a known flow, or as said, executes with filled caches: calls of\n" +
		"# helpers (in a loop, once) with the type of the map; and the instructions of each program. These\n" +
		"# are upper limits. Generated by TestExecutedWork.\n")
	for _, row := range slices.Sorted(maps.Keys(work)) {
		fmt.Fprintf(&text, "\n%s\n", row)
		for _, what := range slices.Sorted(maps.Keys(work[row])) {
			if n := work[row][what]; n != 0 {
				fmt.Fprintf(&text, "\t%d %s\n", n, what)
			}
		}
	}
	return text.String()
}

// readWork is the inverse of formatWork.
func readWork(t *testing.T) map[string]map[string]int {
	t.Helper()
	text := must.Get(os.ReadFile(executedFile))(t)
	out := map[string]map[string]int{}
	row := ""
	for line := range strings.Lines(string(text)) {
		line = strings.TrimSuffix(line, "\n")
		entry, ok := strings.CutPrefix(line, "\t")
		if !ok {
			row = line
			out[row] = map[string]int{}
			continue
		}
		number, what, _ := strings.Cut(entry, " ")
		n, err := strconv.Atoi(number)
		must.Need(t, err == nil, "%s: %q: %v", executedFile, line, err)
		out[row][what] = n
	}
	return out
}

// The verifier refuses a program after a million steps. Linux 6.1 takes twice as many as 6.12.
func TestVerifierBudget(t *testing.T) {
	t.Parallel()
	const limit = 400_000
	for _, delivers := range []bool{false, true} {
		fx := newFixture(t, hookXDP, false, func(o *Options) { o.Delivers = delivers })
		o := fx.d.objects
		traced := must.Get(trace.Open(trace.Filter{}))(t)
		defer traced.Close()
		p := must.Get(traced.Balancer(fx.d.constants, o.PinnedMaps()))(t)
		for _, p := range []*ebpf.Program{
			o.SyExplain, o.SyGc, o.SyTcDecap, o.SyTcIn, o.SyTcOut, o.SyXdp, p.Decap, p.In, p.Out, p.XDP,
		} {
			info := must.Get(p.Info())(t)
			steps, ok := info.VerifiedInstructions()
			must.True(t, ok && steps <= limit, "%s, delivers %v: the verifier takes %d steps; want at most %d",
				info.Name, delivers, steps, limit)
			t.Logf("%s, delivers %v: %d steps", info.Name, delivers, steps)
		}
	}
}
