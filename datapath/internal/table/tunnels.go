package table

import (
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"sync"

	"github.com/vishvananda/netlink"

	"github.com/steelyard-lb/steelyard/datapath/internal/bpf"
	"github.com/steelyard-lb/steelyard/datapath/internal/route"
)

// Tunnels maintains the sources from which tunnel packets are accepted, at any address of this node.
type Tunnels struct {
	filter *Filter
	always []netip.Prefix // Options.TunnelSources
	never  []netip.Addr   // Options.Own

	mu      sync.Mutex // guards all below
	sources *entries[bpf.AllowKey]
	local   *entries[bpf.Addr]
	own     map[netip.Addr]bool // this node's addresses, and its links' broadcast addresses
}

// NewTunnels returns tunnels that do not know this node's addresses until Refresh.
func NewTunnels(
	o *bpf.Objects, filter *Filter, always []netip.Prefix, never []netip.Addr,
) (t *Tunnels, err error) {
	t = &Tunnels{filter: filter, always: always, never: never}
	if t.sources, err = openEntries(o.SyTunnelSrc, func(bpf.AllowKey) uint32 { return 0 }); err != nil {
		return nil, err
	}
	t.local, err = openEntries(o.SyLocalAddrs, func(bpf.Addr) uint32 { return 0 })
	return t, err
}

// Set replaces the sources, including a previous agent's.
func (t *Tunnels) Set(addrs []netip.Addr) error {
	sources := slices.Clone(t.always)
	for _, a := range addrs {
		sources = append(sources, netip.PrefixFrom(a, a.BitLen()))
	}
	allowed := map[bpf.AllowKey]uint32{}
	for _, p := range sources {
		allowed[bpf.ToAllowKey(0, p.Masked())] = 1
	}
	t.mu.Lock()
	err := t.sources.replace(0, allowed)
	t.mu.Unlock()
	if err != nil {
		return fmt.Errorf("allow tunnels: %w", err)
	}
	return t.Refresh()
}

// Refresh rereads this node's addresses from the kernel.
func (t *Tunnels) Refresh() error {
	t.mu.Lock()
	defer t.mu.Unlock()
	addrs, err := netlink.AddrList(nil, netlink.FAMILY_ALL)
	if err != nil {
		return fmt.Errorf("list the addresses of this node: %w", err)
	}
	own, entries := ownAddresses(addrs)
	for _, a := range t.never {
		if own[a] {
			entries[bpf.ToAddr(a)] = 0
		}
	}
	for addr := range own {
		if !t.own[addr] {
			err = errors.Join(err, t.filter.Add(addr, bpf.AddrOwn))
		}
	}
	err = errors.Join(err, t.local.replace(0, entries))
	for addr := range t.own {
		if !own[addr] {
			err = errors.Join(err, t.filter.Remove(addr, bpf.AddrOwn))
		}
	}
	t.own = own
	if err != nil {
		return fmt.Errorf("put the addresses of this node: %w", err)
	}
	return nil
}

// ownAddresses returns this node's addresses, including its links' broadcast addresses, and the entries of
// sy_local_addrs.
func ownAddresses(addrs []netlink.Addr) (own map[netip.Addr]bool, entries map[bpf.Addr]uint32) {
	own, entries = map[netip.Addr]bool{}, map[bpf.Addr]uint32{}
	add := func(ip net.IP, onlyLo uint32) {
		addr, ok := netip.AddrFromSlice(ip)
		if addr = addr.Unmap(); !ok || !addr.IsGlobalUnicast() {
			return
		}
		if key := bpf.ToAddr(addr); own[addr] {
			entries[key] &= onlyLo
		} else {
			own[addr], entries[key] = true, onlyLo
		}
	}
	for _, a := range addrs {
		if a.LinkIndex == route.LoopbackIndex {
			add(a.IP, 1)
			continue
		}
		add(a.IP, 0)
		add(broadcast(a.IPNet), 0)
	}
	return own, entries
}

// broadcast returns the last address of an IPv4 network, or nil if the network has no broadcast address (RFC 3021).
func broadcast(n *net.IPNet) net.IP {
	ip := n.IP.To4()
	ones, bits := n.Mask.Size()
	if ip == nil || bits-ones < 2 {
		return nil
	}
	last := slices.Clone(ip)
	for i := range last {
		last[i] |= ^n.Mask[i]
	}
	return last
}

// TunnelKeys holds the keys of the tunnels between nodes. A packet carries a token derived from a key, which proves to
// the receiver that a node of the cluster sent it, not just a host with a node's address.
type TunnelKeys struct {
	Send   []byte   // for sent packets; if empty, they carry no token
	Accept [][]byte // for received packets; at most three, including Send
	// Required drops packets without the token of an accepted key.
	Required bool
}

// Encode returns the keys in the programs' format.
func (k TunnelKeys) Encode() (out bpf.TunnelKeys, err error) {
	out.Send = TunnelToken(k.Send)
	if len(k.Accept) > len(out.Accept) {
		return out, fmt.Errorf("%d keys; at most %d are accepted", len(k.Accept), len(out.Accept))
	}
	for i, key := range k.Accept {
		out.Accept[i] = TunnelToken(key)
	}
	if k.Required && len(k.Accept) == 0 {
		return out, errors.New("a key is required, but none is accepted")
	}
	out.Required = uint32(bpf.Truth(k.Required))
	return out, nil
}

// TunnelToken returns a key's token, or 0, which means no token, if the key is empty. The key itself is never sent.
func TunnelToken(key []byte) uint64 {
	if len(key) == 0 {
		return 0
	}
	sum := sha256.Sum256(append([]byte("steelyard tunnel token\x00"), key...))
	return max(1, binary.BigEndian.Uint64(sum[:]))
}
