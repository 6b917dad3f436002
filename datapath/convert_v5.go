package datapath

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"path/filepath"
	"slices"
	"time"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"

	"github.com/steelyard-lb/steelyard/lb"
)

// This file reads the maps of schema v5, of the first release. The types are those of its bpf/types.h. Keys of
// frontends, ranges, allowed sources and affinities are as they still are.

type frontendV5 struct {
	ID                                 uint32
	Method, Spread, Restricted, Silent uint8
	First                              uint16
	Chained, _                         uint8
	Affinity                           uint32
}

type backendV5 struct {
	Addr    syAddr
	Snat    [4]syAddr
	Port    uint16
	Here, _ uint8
}

const noBackendV5 = 0xffffffff

type flowV5 struct {
	T                                         syTuple
	Seq, Frontend, Backend                    uint32
	State, Reply, Answered, Fin, Method, Here uint8
	_                                         [2]uint8
	Seen                                      uint64
}

// stateV5 are the pinned maps of schema v5.
type stateV5 struct {
	dir      string
	maps     map[string]*ebpf.Map
	backends map[uint32]backendV5
	byID     map[uint32]lb.Frontend
	reader   *ebpf.Program // of tables
}

// openV5 opens the maps that are converted. These are not: counters, and path MTUs and fragments,
// which are learned again.
func openV5(dir string) (_ earlierState, err error) {
	s := &stateV5{dir: dir, maps: map[string]*ebpf.Map{}, backends: map[uint32]backendV5{},
		byID: map[uint32]lb.Frontend{}}
	defer func() {
		if err != nil {
			s.close()
		}
	}()
	for _, name := range []string{
		"frontends", "ranges", "allowed", "tables", "backends", "members", "affinities", "peers",
		"flows", "halfopen", "oneway",
	} {
		if s.maps[name], err = ebpf.LoadPinnedMap(filepath.Join(dir, name), nil); err != nil {
			return nil, fmt.Errorf("open map %s: %w", name, err)
		}
	}
	err = walkMap(context.Background(), s.maps["backends"], 0, func(id uint32, b backendV5) {
		if b != (backendV5{}) {
			s.backends[id] = b
		}
	})
	if err != nil {
		return nil, err
	}
	s.reader, err = tableReaderV5(s.maps["tables"])
	return s, err
}

func (s *stateV5) close() {
	for _, m := range s.maps {
		m.Close() // of a nil map: nothing
	}
	if s.reader != nil {
		s.reader.Close()
	}
}

func (b backendV5) target() lb.Target {
	return lb.Target{Addr: netip.AddrPortFrom(fromAddr(b.Addr), swap(b.Port)), Weight: 1, Local: b.Here == 1}
}

func (s *stateV5) plans() ([]*lb.FrontendPlan, error) {
	values := map[uint32]frontendV5{}
	note := func(part lb.Frontend, v frontendV5) {
		f, ok := s.byID[v.ID]
		if !ok {
			f = part
		}
		f.Port, f.Last = min(f.Port, part.Port), max(f.Last, part.Last)
		s.byID[v.ID], values[v.ID] = f, v
	}
	var key syFrontendKey
	var prefix syRangeKey
	var value frontendV5
	single, ranges := s.maps["frontends"].Iterate(), s.maps["ranges"].Iterate()
	for single.Next(&key, &value) {
		note(fromFrontendKey(key), value)
	}
	for ranges.Next(&prefix, &value) {
		note(fromRangeKey(prefix), value)
	}
	allow, err := s.allowed()
	if err := errors.Join(single.Err(), ranges.Err(), err); err != nil {
		return nil, fmt.Errorf("read the frontends: %w", err)
	}
	var plans []*lb.FrontendPlan
	for id, f := range s.byID {
		p, err := s.plan(f, values[id], allow[id])
		if err != nil {
			return nil, fmt.Errorf("read frontend %s: %w", f, err)
		}
		plans = append(plans, p)
	}
	return plans, nil
}

// plan returns the plan of a frontend.
func (s *stateV5) plan(f lb.Frontend, v frontendV5, allow []netip.Prefix) (*lb.FrontendPlan, error) {
	p := &lb.FrontendPlan{
		Frontend: f, Affinity: time.Duration(v.Affinity) * time.Second, Allow: allow, DropWhenEmpty: v.Silent == 1,
		Algorithm: map[uint8]lb.Algorithm{1: lb.AlgorithmMaglev, 2: lb.AlgorithmSourceHash, 3: lb.AlgorithmRandom,
			4: lb.AlgorithmRoundRobin, 5: lb.AlgorithmLeastConnections}[v.Spread],
	}
	p.Method, p.Encap = methodV5(v.Method)
	slots, err := s.table(v.ID)
	if err != nil {
		return nil, err
	}
	shares := map[uint32]int{}
	for _, id := range slots {
		if _, ok := s.backends[id]; ok {
			shares[id]++
		}
	}
	for id, n := range shares {
		least := slices.Min(slices.Collect(maps.Values(shares)))
		weight := uint32((n + least/2) / least)
		err := s.maps["members"].Lookup(syMemberKey{Frontend: v.ID, Backend: id}, &weight)
		if err != nil && !errors.Is(err, ebpf.ErrKeyNotExist) {
			return nil, err
		}
		t := s.backends[id].target()
		t.Weight = int(max(weight, 1))
		p.Targets = append(p.Targets, t)
	}
	slices.SortFunc(p.Targets, func(a, b lb.Target) int { return a.Addr.Compare(b.Addr) })
	if v.Chained == 1 { // the hash is another one, so any node may have a flow
		p.NodeForwarding = lb.NodeForwarding{Enabled: true, AnyNode: true}
		for _, t := range p.Targets {
			p.Nodes = append(p.Nodes, lb.Node{Addr: t.Addr.Addr(), Local: t.Local})
		}
	}
	return p, nil
}

func methodV5(word uint8) (lb.Method, lb.Encap) {
	switch word {
	case 1:
		return lb.MethodNAT, ""
	case 2:
		return lb.MethodDSR, ""
	case 3:
		return lb.MethodTunnel, lb.EncapIPIP
	}
	return lb.MethodTunnel, lb.EncapGUE
}

// allowed returns the sources that may open flows, by frontend id.
func (s *stateV5) allowed() (map[uint32][]netip.Prefix, error) {
	allow := map[uint32][]netip.Prefix{}
	var key syAllowKey
	var n uint32
	all := s.maps["allowed"].Iterate()
	for all.Next(&key, &n) {
		allow[swap32(key.Frontend)] = append(allow[swap32(key.Frontend)], fromAllowKey(key))
	}
	return allow, all.Err()
}

func (s *stateV5) tunnelSources() (sources []netip.Prefix, err error) {
	var key syAllowKey
	var n uint32
	all := s.maps["peers"].Iterate()
	for all.Next(&key, &n) {
		sources = append(sources, fromAllowKey(key))
	}
	if err := all.Err(); err != nil {
		return nil, fmt.Errorf("read the sources of tunnels: %w", err)
	}
	return sources, nil
}

// maxSlotsV5 is how many slots of a table are read. The shares of the backends are about those of all slots.
const maxSlotsV5 = 1021

// table returns the backends of the slots of a frontend.
func (s *stateV5) table(frontend uint32) (backends []uint32, err error) {
	slots, err := s.slot(frontend, 0) // the backend of element 0 is the number of slots
	if err != nil || slots == noBackendV5 {
		return nil, err
	}
	n := min(slots, maxSlotsV5)
	for i := range n {
		b, err := s.slot(frontend, uint32(1+uint64(i)*uint64(slots)/uint64(n)))
		if err != nil {
			return nil, err
		}
		backends = append(backends, b)
	}
	return backends, nil
}

// slot returns the backend of an element of a table; noBackendV5 without a table.
func (s *stateV5) slot(frontend, i uint32) (backend uint32, err error) {
	packet := make([]byte, 14) // the shortest that the kernel takes
	binary.NativeEndian.PutUint32(packet, frontend)
	binary.NativeEndian.PutUint32(packet[4:], i)
	if backend, err = s.reader.Run(&ebpf.RunOptions{Data: packet}); err != nil {
		return 0, fmt.Errorf("read a table: %w", err)
	}
	return backend, nil
}

// tableReaderV5 loads a program that returns the backend of an element of the table of a frontend, which a packet
// names: the kernel opens an inner map from the outer one only with CAP_SYS_ADMIN.
func tableReaderV5(tables *ebpf.Map) (*ebpf.Program, error) {
	lookup := func(m asm.Instruction, key int16, stack int16) asm.Instructions {
		return asm.Instructions{
			m, asm.LoadMem(asm.R2, asm.R7, key, asm.Word), asm.StoreMem(asm.RFP, stack, asm.R2, asm.Word),
			asm.Mov.Reg(asm.R2, asm.RFP), asm.Add.Imm(asm.R2, int32(stack)), asm.FnMapLookupElem.Call(),
			asm.JEq.Imm(asm.R0, 0, "none"),
		}
	}
	prog, err := ebpf.NewProgram(&ebpf.ProgramSpec{
		Name: "sy_read_table", Type: ebpf.XDP, License: "Dual BSD/GPL",
		Instructions: slices.Concat(
			asm.Instructions{
				asm.LoadMem(asm.R7, asm.R1, 0, asm.Word), asm.LoadMem(asm.R8, asm.R1, 4, asm.Word),
				asm.Mov.Reg(asm.R1, asm.R7), asm.Add.Imm(asm.R1, 8), asm.JGT.Reg(asm.R1, asm.R8, "none"),
			},
			lookup(asm.LoadMapPtr(asm.R1, tables.FD()), 0, -4),
			lookup(asm.Mov.Reg(asm.R1, asm.R0), 4, -8),
			asm.Instructions{
				asm.LoadMem(asm.R0, asm.R0, 0, asm.Word), asm.Return(),
				asm.Mov.Imm32(asm.R0, -1).WithSymbol("none"), asm.Return(),
			}),
	})
	if err != nil {
		return nil, fmt.Errorf("load the program that reads tables: %w", err)
	}
	return prog, nil
}

func (s *stateV5) flows(ctx context.Context, visit func(earlierFlow)) error {
	var errs []error
	for _, name := range []string{"halfopen", "flows", "oneway"} {
		errs = append(errs, walkMap(ctx, s.maps[name], 0, func(k syFlowKey, f flowV5) {
			b, ok := s.backends[f.Backend]
			if !ok || f.Reply == 1 {
				return
			}
			out := earlierFlow{key: k, to: f.T, backend: b.target(), state: syFlowState(f.State), ack: f.Seq,
				clientFin: f.Fin == 1, answered: f.Answered == 1,
				clientSeen: time.Duration(f.Seen), serverSeen: time.Duration(f.Seen)}
			out.method, out.encap = methodV5(f.Method)
			var reply flowV5
			reverse := syFlowKey{Proto: k.Proto}
			reverse.T = syTuple{Src: f.T.Dst, Dst: f.T.Src, Sport: f.T.Dport, Dport: f.T.Sport}
			if out.method == lb.MethodNAT && s.maps[name].Lookup(&reverse, &reply) == nil {
				out.serverFin, out.serverSeen = reply.Fin == 1, time.Duration(reply.Seen)
			}
			visit(out)
		}))
	}
	return errors.Join(errs...)
}

func (s *stateV5) affinities(ctx context.Context, visit func(earlierAffinity)) error {
	return walkMap(ctx, s.maps["affinities"], 0, func(k syAffinityKey, v syAffinity) {
		f, ok := s.byID[k.Frontend]
		if b, known := s.backends[v.Backend]; ok && known {
			visit(earlierAffinity{k.Client, f, b.target(), v.Seen})
		}
	})
}
