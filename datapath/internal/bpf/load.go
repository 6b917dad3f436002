package bpf

import (
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
	"golang.org/x/sync/errgroup"
	"golang.org/x/sys/unix"
)

// SetVariables sets the programs' constants, by name. Their value of xdp_frags also decides whether sy_xdp accepts
// frames in several buffers.
func SetVariables(spec *ebpf.CollectionSpec, values map[string]any) error {
	for name, value := range values {
		if err := spec.Variables[name].Set(value); err != nil {
			return fmt.Errorf("set %s: %w", name, err)
		}
	}
	if values["xdp_frags"] == Truth(true) {
		spec.Programs["sy_xdp"].Flags |= unix.BPF_F_XDP_HAS_FRAGS
	}
	return nil
}

// Sizes returns the values of the constants that follow from the sizes of maps.
func Sizes(maps map[string]*ebpf.MapSpec) map[string]any {
	return map[string]any{
		"udp_flows":          maps["sy_udp_servers"].MaxEntries,
		"stream_place_lines": maps["sy_stream_places"].MaxEntries,
		"udp_place_lines":    maps["sy_udp_places"].MaxEntries,
	}
}

// OmitXDP replaces sy_xdp by a program that passes all packets, for agents that never attach it. Its verification takes
// a third of the time of a first start.
func OmitXDP(spec *ebpf.CollectionSpec) {
	spec.Programs["sy_xdp"].Instructions = asm.Instructions{asm.Mov.Imm(asm.R0, XDPPass), asm.Return()}
}

// Build identifies the programs of a spec by what distinguishes them from others: the object, the values of its
// constants and variant, and the maps. Ids of maps are unique until a reboot, which removes all pins.
func Build(values map[string]any, variant any, pinned map[string]*ebpf.Map) (string, error) {
	h := sha256.New()
	h.Write(_SyBytes)
	fmt.Fprintln(h, values, variant) // sorted by name
	for _, name := range slices.Sorted(maps.Keys(pinned)) {
		if strings.HasPrefix(name, ".") { // a section of constants, which is not pinned
			continue
		}
		info, err := pinned[name].Info()
		if err != nil {
			return "", fmt.Errorf("read the id of %s: %w", name, err)
		}
		id, _ := info.ID()
		fmt.Fprintln(h, name, id)
	}
	return hex.EncodeToString(h.Sum(nil)[:16]), nil
}

// LoadConcurrently loads all maps and then all programs concurrently, because verification takes most of the time. It
// does not load the programs that loaded, unless it is nil, returns for these maps.
func LoadConcurrently(
	spec *ebpf.CollectionSpec, o ebpf.CollectionOptions,
	loaded func(maps map[string]*ebpf.Map) (map[string]*ebpf.Program, error),
) (_ *ebpf.Collection, err error) {
	programs := spec.Programs
	spec.Programs = nil
	all, err := ebpf.NewCollectionWithOptions(spec, o)
	if err != nil {
		return nil, err
	}
	defer func() {
		if err != nil {
			all.Close()
		}
	}()
	all.Programs = map[string]*ebpf.Program{}
	if loaded != nil {
		if all.Programs, err = loaded(all.Maps); err != nil {
			return nil, err
		}
	}
	maps.DeleteFunc(programs, func(name string, _ *ebpf.ProgramSpec) bool { return all.Programs[name] != nil })
	var loads errgroup.Group
	var mu sync.Mutex // guards all.Programs
	for name, program := range programs {
		one := spec.Copy()
		one.Programs = map[string]*ebpf.ProgramSpec{name: program}
		loads.Go(func() error {
			c, err := ebpf.NewCollectionWithOptions(one, ebpf.CollectionOptions{MapReplacements: all.Maps})
			if err != nil {
				return err
			}
			defer c.Close()
			mu.Lock()
			defer mu.Unlock()
			all.Programs[name] = c.DetachProgram(name)
			return nil
		})
	}
	if err := loads.Wait(); err != nil {
		return nil, err
	}
	return all, nil
}
