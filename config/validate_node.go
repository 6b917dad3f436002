package config

import (
	"net/netip"
	"regexp"
)

// hostName matches DNS names. It allows underscores, because some host names contain them.
var hostName = regexp.MustCompile(`^[A-Za-z0-9_]([-A-Za-z0-9_]{0,62})(\.[A-Za-z0-9_]([-A-Za-z0-9_]{0,62}))*\.?$`)

const hostNameMax = 253

func (d *decoder) node(t *table) {
	n := &d.config.Node
	if i, ok := t.get("name"); ok && i.value != "" {
		if s, ok := i.str("lb1"); ok {
			if !hostName.MatchString(s) || len(s) > hostNameMax {
				i.errorf(`write one like "lb1" or "lb1.example.net"`, "%q is not a host name", s)
			}
			n.Name = s
		}
	}
	if i, ok := t.get("router_id"); ok && i.value != "" {
		if a, ok := i.host(); ok {
			if !a.Is4() {
				i.errorf("write one of this node's IPv4 addresses or, if it has none, any that no other router has",
					"%s is not an IPv4 address", a)
			} else {
				n.RouterID = a
				d.isOwn(a, i)
			}
		}
	}
	n.Address = d.nodeAddress(t)
}

func (d *decoder) nodeAddress(t *table) netip.Addr {
	i, ok := t.get("address")
	if !ok || i.value == "" {
		return netip.Addr{}
	}
	a, ok := i.host()
	if !ok {
		return netip.Addr{}
	}
	d.isOwn(a, i)
	return a
}
