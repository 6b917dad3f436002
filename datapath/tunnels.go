package datapath

import (
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"sync"

	"github.com/cilium/ebpf"
	"github.com/vishvananda/netlink"
)

// tunnels maintains the sources whose tunnel packets are accepted, at any address of this node.
type tunnels struct {
	objects *syObjects
	filter  *addrFilter
	always  []netip.Prefix // Options.TunnelSources

	mu  sync.Mutex          // guards own
	own map[netip.Addr]bool // addresses of this node
}

// SetTunnelSources accepts tunnel packets from these addresses and from Options.TunnelSources, and from no others.
func (d *Datapath) SetTunnelSources(addrs []netip.Addr) error { return d.tunnels.set(addrs) }

// set replaces the sources, also those of an earlier agent.
func (t *tunnels) set(addrs []netip.Addr) error {
	sources := slices.Clone(t.always)
	for _, a := range addrs {
		sources = append(sources, netip.PrefixFrom(a, a.BitLen()))
	}
	allowed := map[syAllowKey]uint32{}
	for _, p := range sources {
		allowed[toAllowKey(0, p.Masked())] = 1
	}
	if err := replaceEntries(t.objects.SyTunnelSrc, allowed); err != nil {
		return fmt.Errorf("allow tunnels: %w", err)
	}
	return t.refresh()
}

// refresh reads the addresses of this node from the kernel again.
func (t *tunnels) refresh() error {
	t.mu.Lock()
	defer t.mu.Unlock()
	addrs, err := netlink.AddrList(nil, netlink.FAMILY_ALL)
	if err != nil {
		return fmt.Errorf("list the addresses of this node: %w", err)
	}
	own, onlyLo := map[netip.Addr]bool{}, map[syAddr]uint32{}
	for _, a := range addrs {
		addr, ok := netip.AddrFromSlice(a.IP)
		if addr = addr.Unmap(); !ok || !addr.IsGlobalUnicast() {
			continue
		}
		key, onLo := toAddr(addr), uint32(0)
		if a.LinkIndex == loopbackIndex {
			onLo = 1
		}
		if own[addr] {
			onlyLo[key] &= onLo
			continue
		}
		own[addr], onlyLo[key] = true, onLo
		if !t.own[addr] {
			err = errors.Join(err, t.filter.add(addr, syAddrKindADDR_OWN))
		}
	}
	err = errors.Join(err, replaceEntries(t.objects.SyLocalAddrs, onlyLo))
	for addr := range t.own {
		if !own[addr] {
			err = errors.Join(err, t.filter.remove(addr, syAddrKindADDR_OWN))
		}
	}
	t.own = own
	if err != nil {
		return fmt.Errorf("put the addresses of this node: %w", err)
	}
	return nil
}

func contains(prefixes []netip.Prefix, addr netip.Addr) bool {
	return slices.ContainsFunc(prefixes, func(p netip.Prefix) bool { return p.Contains(addr) })
}

// replaceEntries makes these the entries of a map.
func replaceEntries[K comparable](m *ebpf.Map, want map[K]uint32) error {
	for k, v := range want {
		if err := m.Put(k, v); err != nil {
			return err
		}
	}
	var stale []K
	var k K
	var v uint32
	entries := m.Iterate()
	for entries.Next(&k, &v) {
		if _, ok := want[k]; !ok {
			stale = append(stale, k)
		}
	}
	if err := entries.Err(); err != nil {
		return err
	}
	for _, k := range stale {
		if err := ignoreMissing(m.Delete(k)); err != nil {
			return err
		}
	}
	return nil
}
