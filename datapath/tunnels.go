package datapath

import (
	"fmt"
	"net/netip"

	"github.com/cilium/ebpf"
	"github.com/vishvananda/netlink"
)

// tunnels keeps what tunnels may end here: those of the sources, at any address of this machine.
type tunnels struct {
	objects *syObjects
	sources []netip.Prefix
}

// open makes the sources the only ones, whatever an earlier agent allowed.
func (t *tunnels) open() error {
	peers := map[syAllowKey]bool{}
	for _, p := range t.sources {
		peers[toAllowKey(0, p.Masked())] = true
	}
	if err := replaceKeys(t.objects.Peers, peers); err != nil {
		return fmt.Errorf("allow tunnels: %w", err)
	}
	return t.refresh()
}

// refresh looks again which addresses this machine has.
func (t *tunnels) refresh() error {
	own := map[syAddr]bool{}
	if len(t.sources) > 0 {
		addrs, err := netlink.AddrList(nil, netlink.FAMILY_ALL)
		if err != nil {
			return fmt.Errorf("list the addresses of this machine: %w", err)
		}
		for _, a := range addrs {
			if addr, ok := netip.AddrFromSlice(a.IP); ok && addr.Unmap().IsGlobalUnicast() {
				own[toAddr(addr.Unmap())] = true
			}
		}
	}
	if err := replaceKeys(t.objects.Own, own); err != nil {
		return fmt.Errorf("note the addresses of this machine: %w", err)
	}
	return nil
}

// replaceKeys makes these the keys of a map whose values say nothing.
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
