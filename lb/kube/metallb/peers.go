package metallb

import (
	"cmp"
	"fmt"
	"slices"
	"strconv"
)

// peers writes [bgp] and its peers.
func (w *writer) peers(o *objects, found map[string]*ways) {
	own := o.peers[0].spec.MyASN
	w.line("\n[bgp]")
	w.line("asn = %d", own)
	for _, p := range o.peers {
		w.peer(o, p, own)
		if pools := poolsOf(o, p.name, found); pools != nil {
			w.strs("pools", pools)
			if len(pools) == 0 {
				w.note("BGPPeer "+p.name, "no advertisement names it; here it receives all routes")
			}
		}
	}
}

func (w *writer) peer(o *objects, p named[peer], own uint32) {
	about, s := "BGPPeer "+p.name, p.spec
	w.line("\n[[bgp.peers]]")
	w.notes(about, p.notes)
	w.str("address", s.Address)
	w.str("interface", s.Interface)
	if s.DynamicASN != "" {
		w.str("asn", s.DynamicASN)
	} else {
		w.line("asn = %d", s.ASN)
	}
	local := s.LocalASN
	if s.MyASN != own {
		local = cmp.Or(local, s.MyASN)
	}
	w.num("local_asn", int(local))
	if s.Port != 179 {
		w.num("port", s.Port)
	}
	w.str("source", s.Source)
	w.str("device", s.VRF)
	w.timers(about, s)
	if s.ConnectTime.Duration != 0 {
		w.str("connect_retry", s.ConnectTime.Duration.String())
	}
	if s.Multihop {
		w.line("multihop = 255")
	}
	if s.Password != "" || s.Secret.Name != "" {
		w.str("password_file", fmt.Sprintf("/etc/steelyard/%s.key", p.name))
		w.note(about, "write its password to this file%s", fromSecret(s.Secret.Name))
	}
	if s.RouterID != "" {
		w.note(about, "set router_id = %q in [node] of each node that needs it", s.RouterID)
	}
	w.selector(about, "node_selector", s.Nodes)
	w.bfd(o, about, s)
}

// timers writes the hold time, and the keepalive time unless it is a third of it. MetalLB derives each from the other.
func (w *writer) timers(about string, s peer) {
	keepalive := s.KeepaliveTime.Duration
	hold := 3 * keepalive
	if s.HoldTime != nil {
		hold = s.HoldTime.Duration
	}
	if hold != 0 || s.HoldTime != nil {
		w.str("hold_time", hold.String())
	}
	switch {
	case keepalive == 0 || 3*keepalive == hold:
	case 3*keepalive > hold:
		w.note(about, "keepalives are sent at least three times in the hold time, not every %s", keepalive)
	default:
		w.str("keepalive", keepalive.String())
	}
}

func fromSecret(name string) string {
	if name == "" {
		return ""
	}
	return fmt.Sprintf(", from the key password of the Secret %s", name)
}

// bfd writes a peer's BFD parameters.
func (w *writer) bfd(o *objects, about string, s peer) {
	if s.BFDProfile == "" {
		return
	}
	profile, ok := o.profiles[s.BFDProfile]
	if !ok {
		w.note(about, "there is no BFDProfile %s; these are the defaults", s.BFDProfile)
	}
	b := profile.spec
	interval := max(cmp.Or(b.Receive, 300), cmp.Or(b.Transmit, 300))
	extra := ""
	if s.Multihop {
		extra = ", multihop = true"
		if b.MinimumTTL != 0 {
			extra += ", min_ttl = " + strconv.Itoa(b.MinimumTTL)
		}
	}
	w.notes("BFDProfile "+s.BFDProfile, profile.notes)
	if b.EchoMode || b.Passive {
		w.note("BFDProfile "+s.BFDProfile, "echoMode and passiveMode have no equivalent")
	}
	if cmp.Or(b.Receive, 300) != cmp.Or(b.Transmit, 300) {
		w.note("BFDProfile "+s.BFDProfile, "one interval is used for both directions: the longer one")
	}
	w.line("bfd = { interval = \"%dms\", multiplier = %d%s }", interval, cmp.Or(b.Multiplier, 3), extra)
}

// poolsOf returns the pools whose routes a peer receives, or nil if these are all pools that BGP announces.
func poolsOf(o *objects, peer string, found map[string]*ways) (names []string) {
	all := true
	names = []string{}
	for _, p := range o.pools {
		if len(found[p.name].bgp) == 0 {
			continue
		}
		if slices.ContainsFunc(found[p.name].bgp, func(a named[bgpAdvertisement]) bool {
			return len(a.spec.Peers) == 0 || slices.Contains(a.spec.Peers, peer)
		}) {
			names = append(names, p.name)
		} else {
			all = false
		}
	}
	if all {
		return nil
	}
	return names
}
