package config

import (
	"fmt"
	"net/netip"
	"strings"
	"unicode"
)

// neighbour reads which of three the peer is: an address, the router on an interface, or any host in a range.
func (d *decoder) neighbour(t *table, p *Peer, seen map[netip.Addr]string) {
	set := func(key string) (item, bool) {
		i, ok := t.get(key)
		return i, ok && i.value != ""
	}
	iface, byInterface := set("interface")
	from, byRange := set("listen_range")
	if !byInterface && !byRange {
		if i, ok := t.need("address", `write address = "192.0.2.1"`); ok {
			p.Address = i.peerAddress(seen)
		}
		return
	}
	const one = "leave out all but one of address, interface and listen_range"
	if i, ok := t.get("address"); ok {
		i.errorf(one, "a peer with interface or listen_range has no address of its own")
	}
	if byInterface && byRange {
		from.errorf(one, "cannot be combined with interface")
		return
	}
	if byInterface {
		if name, ok := iface.interfaceName(); ok {
			p.Interface = name
		}
		for _, key := range []string{"source", "multihop"} {
			if i, ok := set(key); ok && i.value != int64(0) {
				i.errorf("leave it out", "has no effect on a peer with interface, whose session is link-local")
			}
		}
	} else if prefix, ok := from.prefix(); ok {
		p.ListenRange = from.listenRange(prefix)
	}
}

// listenRange limits the size of a range of peers, so that a typo cannot admit everybody.
func (i item) listenRange(p netip.Prefix) netip.Prefix {
	least := 32
	if p.Addr().Is4() {
		least = 8
	}
	switch {
	case p.Bits() < least:
		i.errorf(fmt.Sprintf("write a prefix of at least /%d", least), "%s is too large", p)
	case p.Addr().IsLinkLocalUnicast() && p.Addr().Is6():
		i.errorf(`write interface = "eth0" for the router on a link`, "%s is on every link", p)
	case p.Addr().IsMulticast():
		i.errorf("write the addresses of routers", "%s is multicast", p)
	default:
		return p
	}
	return netip.Prefix{}
}

// interfaceName reads an interface name. The rules come from dev_valid_name in net/core/dev.c.
func (i item) interfaceName() (string, bool) {
	s, ok := i.str("eth0")
	if !ok {
		return "", false
	}
	if s == "" || s == "." || s == ".." || len(s) > interfaceNameMax || strings.ContainsAny(s, "/:") ||
		strings.IndexFunc(s, unicode.IsSpace) >= 0 {
		i.errorf("write one like \"eth0\", of at most 15 bytes", "%q is not the name of an interface", s)
		return "", false
	}
	return s, true
}

// device reads the interface or VRF to which a peer's session is bound.
func (t *table) device(p *Peer) string {
	i, ok := t.get("device")
	if !ok || i.value == "" {
		return ""
	}
	name, ok := i.interfaceName()
	if ok && (p.Interface != "" || p.Address.Zone() != "") {
		i.errorf("leave it out", "has no effect on a peer with a link-local address, whose session is on its interface")
	}
	return name
}

// ranges reports settings that keep peers from connecting, and duplicate ranges and interfaces.
func (d *decoder) ranges(b *BGP) {
	seen := map[string]int{}
	for n, p := range b.Peers {
		key, value := "interface", p.Interface
		if p.Passive && b.ListenPort == -1 {
			item{d: d, path: "bgp.peers" + index(n) + ".passive"}.errorf("set listen_port, or remove passive",
				"neither side would connect with listen_port = -1")
		}
		if p.ListenRange.IsValid() {
			key, value = "listen_range", p.ListenRange.String()
		}
		if value == "" {
			continue
		}
		i := item{d: d, path: "bgp.peers" + index(n) + "." + key}
		if other, ok := seen[value]; ok {
			i.errorf("remove one of the two", "%s is also bgp.peers%s.%s", value, index(other), key)
		}
		seen[value] = n
		if key == "listen_range" && b.ListenPort == -1 {
			i.errorf("set listen_port, or remove listen_range", "nobody can connect with listen_port = -1")
		}
	}
}
