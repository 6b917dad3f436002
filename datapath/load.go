package datapath

import (
	"errors"
	"fmt"
	"path/filepath"
	"time"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/rlimit"
	"github.com/vishvananda/netlink"
)

// load loads the programs of this binary, with the maps pinned in dir or, where there are none, with new ones.
func load(o Options, dir string) (*syObjects, error) {
	if err := rlimit.RemoveMemlock(); err != nil {
		return nil, fmt.Errorf("lift the limit on locked memory: %w", err)
	}
	spec, err := loadSy()
	if err != nil {
		return nil, fmt.Errorf("read the embedded programs: %w", err)
	}
	for name, value := range map[string]uint16{"snat_first": o.SNATPorts[0], "snat_last": o.SNATPorts[1]} {
		if err := spec.Variables[name].Set(value); err != nil {
			return nil, fmt.Errorf("set %s: %w", name, err)
		}
	}
	if err := spec.Variables["no_xdp_tx"].Set(anyVeth(o.Interfaces)); err != nil {
		return nil, fmt.Errorf("set no_xdp_tx: %w", err)
	}
	// Two entries a flow, one for each direction.
	spec.Maps["flows"].MaxEntries = uint32(2 * o.MaxFlows)
	spec.Maps["halfopen"].MaxEntries = uint32(max(1<<16, o.MaxFlows/4))
	for name, m := range spec.Maps {
		if name == ".rodata" {
			continue
		}
		m.Pinning = ebpf.PinByName
		if name == "flows" || name == "halfopen" {
			keepSize(o, m, filepath.Join(dir, name))
		}
	}
	var objects syObjects
	err = spec.LoadAndAssign(&objects, &ebpf.CollectionOptions{Maps: ebpf.MapOptions{PinPath: dir}})
	var verifier *ebpf.VerifierError
	switch {
	case errors.Is(err, ebpf.ErrMapIncompatible):
		return nil, fmt.Errorf("what an earlier version left in %s does not fit this one: %w; stop the agent and run \"steelyard cleanup\", which ends its flows", dir, err)
	case errors.As(err, &verifier):
		return nil, fmt.Errorf("the kernel refuses a program: %w", err)
	case err != nil:
		return nil, fmt.Errorf("load the programs: %w", err)
	}
	return &objects, nil
}

// anyVeth returns 1 when an interface is one end of a veth pair.
func anyVeth(names []string) uint8 {
	for _, name := range names {
		if nic, err := netlink.LinkByName(name); err == nil && nic.Type() == "veth" {
			return 1
		}
	}
	return 0
}

// keepSize makes m as large as the pinned map of that name: flows matter more than a changed max_flows.
func keepSize(o Options, m *ebpf.MapSpec, path string) {
	pinned, err := ebpf.LoadPinnedMap(path, nil)
	if err != nil {
		return // there is none
	}
	defer pinned.Close()
	if pinned.MaxEntries() != m.MaxEntries {
		o.Log.Warn("max_flows changed; the table in the kernel keeps its size until \"steelyard cleanup\"",
			"table", m.Name, "entries", pinned.MaxEntries(), "wanted", m.MaxEntries)
		m.MaxEntries = pinned.MaxEntries()
	}
}

// timeouts are the times after which a silent flow is over, as the programs have them.
type timeouts struct{ halfOpen, established, closing, closed, udp time.Duration }

func readTimeouts(o *syObjects) (t timeouts, err error) {
	for _, x := range []struct {
		v  *ebpf.Variable
		to *time.Duration
	}{
		{o.TimeoutHalfOpen, &t.halfOpen}, {o.TimeoutEstablished, &t.established},
		{o.TimeoutClosing, &t.closing}, {o.TimeoutClosed, &t.closed}, {o.TimeoutUdp, &t.udp},
	} {
		var ns uint64
		if err := x.v.Get(&ns); err != nil {
			return t, fmt.Errorf("read a timeout: %w", err)
		}
		*x.to = time.Duration(ns)
	}
	return t, nil
}
