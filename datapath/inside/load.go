package inside

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
	"github.com/cilium/ebpf/btf"
	"github.com/cilium/ebpf/features"
	"github.com/cilium/ebpf/rlimit"

	"github.com/steelyard-lb/steelyard/datapath/inside/internal/prog"
	"github.com/steelyard-lb/steelyard/datapath/internal/bpf"
	"github.com/steelyard-lb/steelyard/datapath/internal/hook"
)

// hasConntrack reports whether programs can ask connection tracking, which may be a module.
func hasConntrack() bool {
	var f *btf.Func
	kernel, err := btf.LoadKernelSpec()
	if err == nil && kernel.TypeByName("bpf_skb_ct_lookup", &f) == nil {
		return true
	}
	module, err := btf.LoadKernelModuleSpec("nf_conntrack")
	return err == nil && module.TypeByName("bpf_skb_ct_lookup", &f) == nil
}

// constants returns the values of the programs' constants.
func constants(device int) (map[string]any, error) {
	netns, err := hook.NetworkNamespace()
	return map[string]any{
		"in_device_index": uint32(device), "host_netns": netns, "in_conntrack": bpf.Truth(hasConntrack()),
		"sock_refuses": bpf.Truth(features.HaveProgramHelper(ebpf.CGroupSockAddr, asm.FnSetRetval) == nil),
	}, err
}

// load loads the programs with the maps pinned in dir. Maps of another layout are replaced, which ends the flows.
func load(dir string, constants map[string]any, noSocketLB bool) (*prog.Objects, error) {
	if err := rlimit.RemoveMemlock(); err != nil {
		return nil, fmt.Errorf("lift the limit on locked memory: %w", err)
	}
	spec, err := prog.LoadIn()
	if err != nil {
		return nil, fmt.Errorf("read the embedded programs: %w", err)
	}
	err = errors.Join(bpf.SetVariables(spec, constants),
		bpf.SetVariables(spec, map[string]any{"sock_tcp": bpf.Truth(!noSocketLB)}))
	if err != nil {
		return nil, err
	}
	for name, m := range spec.Maps {
		if strings.HasPrefix(name, "sy_in_") {
			m.Pinning = ebpf.PinByName
		}
	}
	for attempt := 0; ; attempt++ {
		if err := os.MkdirAll(dir, 0o700); err != nil {
			return nil, fmt.Errorf("create the directory for pinned maps: %w", err)
		}
		objects := new(prog.Objects)
		err := spec.LoadAndAssign(objects, &ebpf.CollectionOptions{Maps: ebpf.MapOptions{PinPath: dir}})
		if err == nil {
			return objects, nil
		}
		if !errors.Is(err, ebpf.ErrMapIncompatible) || attempt > 0 {
			return nil, fmt.Errorf("load the programs: %w", err)
		}
		files, err := os.ReadDir(dir) // not dir itself, on which another process may have a lock
		for _, f := range files {
			err = errors.Join(err, os.RemoveAll(filepath.Join(dir, f.Name())))
		}
		if err != nil {
			return nil, fmt.Errorf("remove the maps of another version: %w", err)
		}
	}
}
