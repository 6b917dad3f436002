package config

import (
	"fmt"
	"net/netip"
	"strconv"
	"time"

	"github.com/steelyard-lb/steelyard/lb"
)

func defaultBGP() *BGP {
	return &BGP{
		ListenPort: 179, LocalPref: 100, AggregateV4: 32, AggregateV6: 128, Weighted: lb.WeightedMovable,
		RestartTime: 30 * time.Second, GracefulShutdown: 2 * time.Second,
		MaxRoutes: 1000,
	}
}

func defaultPeer() Peer {
	return Peer{
		Port: 179, HoldTime: 9 * time.Second, ConnectRetry: 2 * time.Second, MaxReceived: 1000, GracefulRestart: true,
	}
}

func (d *decoder) bgp(t *table) *BGP {
	b := defaultBGP()
	b.ASN = t.asn()
	if i, ok := t.get("listen_port"); ok && i.value != int64(-1) {
		if n, ok := i.integer(1, 65535); ok {
			b.ListenPort = int(n)
		} else if i.value == int64(0) {
			d.errs[len(d.errs)-1].Hint = "write -1 to never listen, or a port"
		}
	} else if ok {
		b.ListenPort = -1
	}
	seen := map[netip.Addr]string{}
	for _, p := range t.tables("peers") {
		b.Peers = append(b.Peers, d.peer(p, b.ASN, seen))
	}
	d.ranges(b)
	b.Communities = distinct(t.list("communities", "64512:100"), item.community)
	b.LocalPref = integer(t, "local_pref", b.LocalPref, 0, 1<<32-1)
	b.AggregateV4, b.AggregateV6 = t.aggregates(b.AggregateV4, b.AggregateV6)
	b.Weighted = t.weighted(b.Weighted)
	b.RestartTime = t.restartTime(b.RestartTime)
	b.LongLivedRestartTime = t.longLivedRestartTime(b.RestartTime)
	b.MaxRoutes = integer(t, "max_routes", b.MaxRoutes, 1, 1<<20)
	b.GracefulShutdown = t.duration("graceful_shutdown", b.GracefulShutdown, 0, 10*time.Second)
	return b
}

// weighted reads the key that selects which routes have weights.
func (t *table) weighted(def lb.Weighted) lb.Weighted {
	i, ok := t.get("weighted")
	switch {
	case !ok, i.value == true:
		return def
	case i.value == "always":
		return lb.WeightedAlways
	case i.value != false:
		i.errorf(`write true, false or "always"`, "%s, but must be true, false or \"always\"", i.what())
	}
	return lb.WeightedNever
}

// aggregates reads prefix lengths. Their minimum, a /8 and a /16, keeps a typo from announcing a default route.
func (t *table) aggregates(v4, v6 int) (int, int) {
	return integer(t, "aggregate_v4", v4, 8, 32), integer(t, "aggregate_v6", v6, 16, 128)
}

// asn reads an AS number that is not reserved.
func (t *table) asn() uint32 {
	i, ok := t.need("asn", "write asn = 64512, or the AS number of this site")
	if !ok {
		return 0
	}
	return i.asn()
}

func (i item) asn() uint32 {
	n, ok := i.integer(1, 1<<32-1)
	if !ok {
		return 0
	}
	const reserved = "%d is a reserved AS number (%s)"
	switch n {
	case 23456:
		i.errorf("write the 4-byte number that it stands for", reserved, n, "AS_TRANS, RFC 6793")
	case 65535, 1<<32 - 1:
		i.errorf("private ones are 64512 to 65534 and 4200000000 to 4294967294", reserved, n, "RFC 7300")
	}
	return uint32(n)
}

// peerASN reads a peer's AS number, or "external" or "internal".
func (t *table) peerASN(own uint32) (asn uint32, external bool) {
	i := t.at("asn")
	text, ok := i.value.(string)
	if _, err := strconv.ParseUint(text, 10, 64); !ok || err == nil { // a quoted number is a separate error
		return t.asn(), false
	}
	i, _ = t.get("asn")
	switch text, _ = i.word("AS", []string{"external", "internal"}); text {
	case "external":
		return 0, true
	case "internal":
		return own, false
	}
	return 0, false
}

func (d *decoder) peer(t *table, asn uint32, seen map[netip.Addr]string) Peer {
	p := defaultPeer()
	d.neighbour(t, &p, seen)
	if i, ok := t.get("local_asn"); ok && i.value != int64(0) {
		p.LocalASN = i.asn()
		asn = p.LocalASN
	}
	p.ASN, p.External = t.peerASN(asn)
	p.Port = integer(t, "port", p.Port, 1, 65535)
	p.Password = t.secret("password_file", "/etc/steelyard/peer.key", 1, 80) // TCP_MD5SIG_MAXKEYLEN
	p.HoldTime = t.holdTime(p.HoldTime)
	p.Keepalive = t.keepalive(p.HoldTime)
	p.ConnectRetry = t.duration("connect_retry", p.ConnectRetry, time.Second, time.Hour)
	p.Passive = t.boolean("passive", p.Passive)
	p.MaxReceived = integer(t, "max_received", p.MaxReceived, 0, 1<<32-1)
	p.Multihop = integer(t, "multihop", p.Multihop, 0, 255)
	p.TTLSecurity = t.boolean("ttl_security", p.TTLSecurity)
	if p.TTLSecurity && p.Multihop > 0 {
		t.at("ttl_security").errorf("leave one of the two out",
			"cannot be combined with multihop = %d, because it works only with directly connected peers", p.Multihop)
	}
	if i, ok := t.get("source"); ok && i.value != "" {
		p.Source = d.source(i, p.Address)
	}
	p.GracefulRestart = t.boolean("graceful_restart", p.GracefulRestart)
	p.BFD = t.bfd(p.Multihop)
	p.Device = t.device(&p)
	p.NodeSelector = t.selector("node_selector")
	p.Pools = distinct(t.list("pools", "public"), func(i item) (string, bool) { return i.str("public") })
	p.Attributes = t.attributes()
	p.Prepend = integer(t, "prepend", p.Prepend, 0, 10)
	if p.Prepend > 0 && p.ASN == asn {
		t.at("prepend").errorf("write local_pref or med", "has no effect on a peer of the same AS (%d)", asn)
	}
	t.done()
	return p
}

func (t *table) attributes() Attributes {
	a := Attributes{Communities: distinct(t.list("communities", "64512:100"), item.community)}
	a.LocalPref, a.MED = t.optionalUint32("local_pref"), t.optionalUint32("med")
	return a
}

// optionalUint32 returns nil if the file does not have the key.
func (t *table) optionalUint32(key string) *uint32 {
	if _, ok := t.get(key); !ok { // get makes the key known to suggestions
		return nil
	}
	n := integer(t, key, uint32(0), 0, 1<<32-1)
	return &n
}

// bfd reads true, false or a table. hops is the maximum distance of the peer, or 0 if it is one or unknown.
func (t *table) bfd(hops int) BFD {
	i, ok := t.get("bfd")
	values, isTable := i.value.(map[string]any)
	on, isBool := i.value.(bool)
	switch {
	case !ok:
		return BFD{}
	case !isTable && !isBool:
		i.errorf(`write true, false, or { interval = "100ms", multiplier = 3 }`,
			"%s, but must be true, false or a table", i.what())
		return BFD{}
	case isBool && !on:
		return BFD{}
	}
	sub := i.table(values) // empty if the value is true
	b := BFD{
		Interval:   sub.duration("interval", 100*time.Millisecond, 10*time.Millisecond, time.Minute),
		Multiplier: integer(sub, "multiplier", 3, 1, 255),
		Multihop:   sub.boolean("multihop", hops > 0),
	}
	if b.Multihop {
		lowest := 0
		if hops > 0 {
			lowest = 256 - hops // the first hop does not decrement the TTL
		}
		b.MinTTL = integer(sub, "min_ttl", lowest, 0, 255)
	} else if sub.has("min_ttl") {
		integer(sub, "min_ttl", 0, 0, 255)
		sub.at("min_ttl").errorf("leave it out, or add multihop = true",
			"has no effect over one hop, where packets must have a TTL of 255")
	}
	sub.done()
	return b
}

// peerAddress reads the address of a neighbour. A link-local address needs a zone.
func (i item) peerAddress(seen map[netip.Addr]string) netip.Addr {
	s, ok := i.str(likeAddr)
	if !ok {
		return netip.Addr{}
	}
	a, err := netip.ParseAddr(s)
	switch {
	case err == nil && a.Zone() != "" && a.IsLinkLocalUnicast():
	case err == nil && a.Is6() && a.IsLinkLocalUnicast():
		i.errorf(fmt.Sprintf(`write the interface after it, as in "%s%%eth0"`, a), "%s is on every link", a)
		return netip.Addr{}
	default:
		if a, ok = i.host(); !ok {
			return netip.Addr{}
		}
	}
	if other, ok := seen[a]; ok {
		i.errorf("remove one of the two", "%s is also %s", a, other)
		return a
	}
	seen[a] = i.where()
	i.d.isOwn(a, i)
	return a
}

func (d *decoder) source(i item, peer netip.Addr) netip.Addr {
	a, ok := i.host()
	if !ok {
		return netip.Addr{}
	}
	if peer.IsValid() && a.Is4() != peer.Is4() {
		i.errorf("write an address of this node in the family of the peer",
			"%s and the peer %s have different address families", a, peer)
		return netip.Addr{}
	}
	d.isOwn(a, i)
	return a
}

// restartTime reads a time. The capability has 12 bits for its seconds (RFC 4724 §3).
func (t *table) restartTime(def time.Duration) time.Duration {
	return t.seconds("restart_time", def, 4095*time.Second)
}

// longLivedRestartTime reads a time. The capability has 24 bits for its seconds (RFC 9494, section 3.1) and requires
// graceful restart.
func (t *table) longLivedRestartTime(restart time.Duration) time.Duration {
	key := "long_lived_restart_time"
	if other := "long_lived"; t.has(other) {
		if t.has(key) {
			t.at(other).errorf("leave one of the two out", "is the same as %s", key)
		}
		key = other
	}
	r := t.seconds(key, 0, (1<<24-1)*time.Second)
	if r > 0 && restart == 0 {
		t.at(key).errorf(`write restart_time = "1s" or more`, "needs graceful restart, but restart_time is 0")
		return 0
	}
	return r
}

// keepalive reads the time between KEEPALIVEs. 0 means a third of the hold time.
func (t *table) keepalive(hold time.Duration) time.Duration {
	k := t.duration("keepalive", 0, 0, 65535*time.Second)
	i := t.at("keepalive")
	switch {
	case k == 0:
	case hold == 0:
		i.errorf("leave it out", `has no effect with hold_time = "0s"`)
	case k < time.Second:
		i.errorf(`write at least "1s"`, "%q is too short", i.value)
	case k > hold/3:
		i.errorf(fmt.Sprintf("write at most %q, a third of hold_time", short(hold/3)),
			"%q is too long, because the loss of one message would end the session", i.value)
	default:
		return k
	}
	return 0
}

// holdTime reads the hold time: 0 or at least 3 s, encoded as two bytes of seconds (RFC 4271 §4.2).
func (t *table) holdTime(def time.Duration) time.Duration {
	const most = 65535 * time.Second
	h := t.duration("hold_time", def, 0, most)
	if h == 0 && t.at("hold_time").value != nil || h >= 3*time.Second && h%time.Second == 0 {
		return h
	}
	i := t.at("hold_time")
	if h%time.Second != 0 {
		seconds := max(h.Truncate(time.Second), 3*time.Second)
		i.errorf(fmt.Sprintf("write %q", short(seconds)), "%q is not a whole number of seconds", i.value)
	} else {
		i.errorf(`write at least "3s", or "0s" for a session without keepalives (RFC 4271 §4.2)`,
			"%q is too short", i.value)
	}
	return def
}
