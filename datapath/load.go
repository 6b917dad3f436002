package datapath

import (
	"errors"
	"fmt"
	"path/filepath"
	"slices"
	"strings"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
	"github.com/cilium/ebpf/features"
	"github.com/cilium/ebpf/rlimit"
	"github.com/vishvananda/netlink"

	"github.com/steelyard-lb/steelyard/datapath/internal/bpf"
	"github.com/steelyard-lb/steelyard/datapath/internal/hook"
	"github.com/steelyard-lb/steelyard/datapath/internal/pin"
	"github.com/steelyard-lb/steelyard/lb"
)

// load loads the embedded programs with the pinned maps and these values of constants, or takes them over if a previous
// agent has pinned the same ones. It creates and pins what is missing. inner holds the specs of inner maps by the name
// of their outer map.
func load(
	o Options, spec *ebpf.CollectionSpec, values map[string]any, pins *pin.Pins, t *pin.Transaction,
) (_ *bpf.Objects, inner map[string]*ebpf.MapSpec, err error) {
	if err := rlimit.RemoveMemlock(); err != nil {
		return nil, nil, fmt.Errorf("lift the limit on locked memory: %w", err)
	}
	if err := bpf.SetVariables(spec, values); err != nil {
		return nil, nil, err
	}
	sizes := tableSizes(o.MaxFlows)
	for name, m := range spec.Maps {
		size, sized := sizes[name]
		if sized {
			m.MaxEntries = size
		}
		if sized || m.Type == ebpf.Hash || m.Type == ebpf.LRUHash {
			keepSize(m, filepath.Join(pins.Dir, name))
		}
		if !strings.HasPrefix(name, ".") { // not a section of constants
			m.Pinning = ebpf.PinByName
		}
	}
	if err := bpf.SetVariables(spec, bpf.Sizes(spec.Maps)); err != nil {
		return nil, nil, err
	}
	if o.Mode == ModeTC {
		bpf.OmitXDP(spec)
	}
	var objects bpf.Objects
	build := ""
	all, err := bpf.LoadConcurrently(spec, ebpf.CollectionOptions{Maps: ebpf.MapOptions{PinPath: pins.Dir}},
		func(maps map[string]*ebpf.Map) (_ map[string]*ebpf.Program, err error) {
			if build, err = bpf.Build(values, o.Mode == ModeTC, maps); err != nil {
				return nil, err
			}
			return pins.Programs(build)
		})
	if err == nil {
		if err = pins.PinPrograms(all.Programs, build, t); err == nil {
			err = all.Assign(&objects)
		}
		all.Close() // what is not assigned
	}
	var verifier *ebpf.VerifierError
	switch {
	case errors.Is(err, ebpf.ErrMapIncompatible):
		return nil, nil, fmt.Errorf("the maps that an earlier version pinned in %s are incompatible: %w; "+
			"stop the agent and run \"steelyard cleanup\", which ends all flows", pins.Dir, err)
	case errors.As(err, &verifier):
		return nil, nil, fmt.Errorf("the kernel rejects a program: %w", err)
	case err != nil:
		return nil, nil, fmt.Errorf("load the programs: %w", err)
	}
	inner = map[string]*ebpf.MapSpec{}
	for name, m := range spec.Maps {
		if m.InnerMap != nil {
			inner[name] = m.InnerMap.Copy() // including the template's BTF, which Linux before 6.2 compares
			inner[name].Name = name
		}
	}
	return &objects, inner, nil
}

// constants returns the values of the programs' constants that do not follow from the sizes of maps.
func constants(o Options) map[string]any {
	var first, last [maxPortRanges]uint16
	ports := uint32(0)
	for i, r := range o.SNATPorts {
		first[i], last[i], ports = r.First, r.Last, ports+uint32(r.Last-r.First)+1
	}
	netns, err := hook.NetworkNamespace()
	if err != nil {
		netns = 0 // of no socket; hook.BalanceSockets reports the error
	}
	return map[string]any{
		"host_netns": netns,
		"snat_first": first, "snat_last": last, "snat_ports": ports,
		"xdp_frags": bpf.Truth(anyInterface(o.Interfaces, func(l netlink.Link) bool {
			return l.Attrs().MTU > 1500
		})),
		"no_xdp_tx":   bpf.Truth(anyInterface(o.Interfaces, func(l netlink.Link) bool { return l.Type() == "veth" })),
		"tunnel_port": o.TunnelPort, "tunnel_decap": bpf.Truth(o.Delivers || len(o.TunnelSources) > 0),
		"local_delivery":    bpf.Truth(o.servesSelf()),
		"sock_refuses":      bpf.Truth(features.HaveProgramHelper(ebpf.CGroupSockAddr, asm.FnSetRetval) == nil),
		"hash_keys":         bpf.HashKeys(o.HashSeed),
		"timeout_half_open": uint64(o.Timeouts.HalfOpen), "timeout_established": uint64(o.Timeouts.Established),
		"timeout_closing": uint64(o.Timeouts.Closing), "timeout_closed": uint64(o.Timeouts.Closed),
		"timeout_udp": uint64(o.Timeouts.UDP),
	}
}

// anyInterface reports whether like is true for one of the interfaces.
func anyInterface(names []string, like func(netlink.Link) bool) bool {
	return slices.ContainsFunc(names, func(name string) bool {
		nic, err := netlink.LinkByName(name)
		return err == nil && like(nic)
	})
}

// keepSize sets m's size to the size of the map pinned at path, because a takeover keeps the entries and ignores a new
// max_flows or another version's size. The programs contain no size of a hash map.
func keepSize(m *ebpf.MapSpec, path string) {
	pinned, err := ebpf.LoadPinnedMap(path, nil)
	if err != nil {
		return // nothing is pinned
	}
	defer pinned.Close()
	m.MaxEntries = pinned.MaxEntries()
}

// keptSize returns a finding if a previous agent's tables are smaller than max_flows. Larger ones only take memory.
func (d *Datapath) keptSize() []lb.Finding {
	n := d.objects.SyStreamServers.MaxEntries()
	if uint64(n) >= uint64(d.o.MaxFlows) {
		return nil
	}
	return []lb.Finding{lb.FoundTableSize.About("",
		"max_flows is %d, but the flow tables in the kernel keep their size for %d: "+
			"drain this node (\"steelyard drain --node\"), stop the agent, run \"steelyard cleanup\", which ends all "+
			"connections, and start the agent", d.o.MaxFlows, n)}
}

// pinsWritable returns a finding if other users may write to the bpffs of the pins. They could create the directory
// before the first start and so keep the agent from starting.
func (d *Datapath) pinsWritable() []lb.Finding {
	dir, mode, open := d.pins.OpenToAll()
	if !open {
		return nil
	}
	return []lb.Finding{lb.FoundPinsWritable.About(dir, "other users may write to the bpffs %s (%s): chmod 0700 %[1]s",
		dir, mode)}
}

// tableSizes returns the max_entries of the maps whose size depends on max_flows. The maps of established flows and of
// UDP flows allocate memory per entry, and 16 bytes for each of max_entries, rounded up to a power of two. The others
// are LRU maps, which allocate all memory when they are created.
func tableSizes(maxFlows int) map[string]uint32 {
	return map[string]uint32{
		"sy_stream_clients":   uint32(maxFlows),
		"sy_stream_servers":   uint32(maxFlows),
		"sy_udp_clients":      uint32(max(1, maxFlows/udpPart)),
		"sy_udp_servers":      uint32(max(1, maxFlows/udpPart)),
		"sy_stream_places":    uint32(maxFlows/placePart + 1),
		"sy_udp_places":       uint32(maxFlows/udpPart/placePart + 1),
		"sy_halfopen_clients": uint32(max(1<<16, maxFlows/4)),
		"sy_halfopen_servers": uint32(max(1<<16, maxFlows/4)),
		"sy_dsr_flows":        uint32(max(1<<15, maxFlows/4)),
		"sy_dsr_halfopen":     uint32(max(1<<14, maxFlows/8)),
		"sy_affinity":         uint32(max(1<<14, maxFlows/16)),
	}
}

// udpPart limits UDP flows to max_flows/udpPart, in addition to max_flows for the other protocols. A frontend may have
// as many UDP flows as entries are free.
const udpPart = 2

// placePart is the number of flows in a table per line of five places (bpf/reclaim.h). Half of the flows of a full
// table have a place. They take 60 percent of the places, so almost every flow finds one.
const placePart = 6

// addPorts makes the programs look up flows for packets to these source ports. Ports are never removed, because live
// flows may use ports from a previous configuration.
func addPorts(objects *bpf.Objects, ranges []PortRange) error {
	words := map[uint32]uint64{}
	for _, r := range ranges {
		for port := uint32(r.First); port <= uint32(r.Last); port++ {
			words[port/64] |= 1 << (port % 64)
		}
	}
	for i, add := range words {
		var word uint64
		if err := objects.SySnatPorts.Lookup(i, &word); err != nil {
			return fmt.Errorf("read the source ports: %w", err)
		}
		if word&add == add {
			continue
		}
		if err := objects.SySnatPorts.Put(i, word|add); err != nil {
			return fmt.Errorf("put the source ports: %w", err)
		}
	}
	return nil
}
