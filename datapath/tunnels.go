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
	allowed := map[syAllowKey]bool{}
	for _, p := range sources {
		allowed[toAllowKey(0, p.Masked())] = true
	}
	if err := replaceKeys(t.objects.SyTunnelSrc, allowed); err != nil {
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
	own, keys := map[netip.Addr]bool{}, map[syAddr]bool{}
	for _, a := range addrs {
		addr, ok := netip.AddrFromSlice(a.IP)
		if addr = addr.Unmap(); !ok || !addr.IsGlobalUnicast() || own[addr] {
			continue
		}
		own[addr], keys[toAddr(addr)] = true, true
		if !t.own[addr] {
			err = errors.Join(err, t.filter.add(addr, syAddrKindADDR_OWN))
		}
	}
	err = errors.Join(err, replaceKeys(t.objects.SyLocalAddrs, keys))
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

// replaceKeys makes these the keys of a map that is used as a set.
func replaceKeys[K comparable](m *ebpf.Map, keys map[K]bool) error {
	for k := range keys {
		if err := m.Put(k, uint32(1)); err != nil {
			return err
		}
	}
	var stale []K
	var k K
	var v uint32
	entries := m.Iterate()
	for entries.Next(&k, &v) {
		if !keys[k] {
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
