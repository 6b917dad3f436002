package config

import (
	"fmt"
	"net/netip"
	"slices"
	"time"

	"github.com/steelyard-lb/steelyard/lb"
)

const affinityMax = 24 * time.Hour

func defaultService() Service {
	return Service{
		Algorithm: lb.AlgorithmMaglev, Method: lb.MethodNAT, Encap: lb.EncapIPIP, SNAT: true, MinHealthy: 1,
		OnDown: OnDownReset, OnAllDown: OnAllDownWithdraw,
	}
}

// placed is a value with its item in the file, to validate several keys together.
type placed[T any] struct {
	v    T
	item item
}

// values returns the bare values in a slice without spare capacity, or nil if there are none.
func values[T any](all []placed[T]) []T {
	if len(all) == 0 {
		return nil
	}
	out := make([]T, len(all))
	for i, p := range all {
		out[i] = p.v
	}
	return out
}

func (d *decoder) service(t *table) {
	s, warnings := defaultService(), len(d.warnings)
	s.Name = t.name("service", d.names)
	vips, f := d.addresses(t, &s)
	ports := d.servicePorts(t)
	backends := d.backends(t)
	s.Algorithm = word(t, "algorithm", "algorithm", s.Algorithm, lb.Algorithms)
	s.Method = word(t, "forward", "method", s.Method, lb.Methods)
	s.Encap = word(t, "tunnel", "encapsulation", s.Encap, lb.Encaps)
	if t.has("tunnel") && s.Method != lb.MethodTunnel {
		t.at("tunnel").warnf(`write forward = "tunnel", or leave tunnel out`,
			"has no effect with forward = %q", s.Method)
	}
	s.SNAT = t.boolean("snat", s.SNAT)
	if t.has("snat") && s.Method != lb.MethodNAT {
		t.at("snat").warnf("leave snat out",
			"has no effect with forward = %q: servers always receive the address of the client", s.Method)
	}
	s.Affinity = t.duration("affinity", 0, 0, affinityMax)
	s.Allow = distinct(t.list("allow", "192.0.2.0/24"), item.prefix)
	s.Ports = values(ports)
	s.Backends = values(backends)
	s.MinHealthy = minHealthy(t, &s, f)
	d.addressPerNode(t, &s)
	s.OnDown = word(t, "on_down", "value", s.OnDown, []string{OnDownReset, OnDownKeep})
	s.OnAllDown = word(t, "on_all_down", "value", s.OnAllDown, []string{OnAllDownWithdraw, OnAllDownKeep})
	s.Check = d.check(t, &s)
	if s.Check.Type == lb.CheckNodePort && !t.has("on_all_down") {
		s.OnAllDown = OnAllDownUnanswered // an older service proxy serves no such port
	}

	d.claimFrontends(vips, s.Ports)
	checkFamilies(vips, backends, f, s.Method)
	samePorts(ports, backends, s.Method)
	rangesMeet(ports, backends)
	allowMeets(t, &s)
	t.done(elsewhereInService...)
	if len(d.warnings) > warnings || s.Check.TLSCA != "" {
		if d.config.decodeAgain == nil {
			d.config.decodeAgain = map[string]bool{}
		}
		d.config.decodeAgain[s.Name] = true
	}
	d.config.Services = append(d.config.Services, s)
}

// elsewhereInService are check keys that users may write in the service by mistake.
var elsewhereInService = []string{"check.interval", "check.timeout", "check.rise", "check.fall", "check.path",
	"check.type", "check.expect_status", "check.host"}

type families struct {
	v4, v6 bool
	known  bool // false if an address or the pool could not be read
}

func (f families) has(a netip.Addr) bool { return a.Is4() && f.v4 || a.Is6() && f.v6 }

func (f *families) note(a netip.Addr) {
	f.v4 = f.v4 || a.Is4()
	f.v6 = f.v6 || a.Is6()
}

// addresses reads address and pool. A service needs one of them.
func (d *decoder) addresses(t *table, s *Service) ([]placed[netip.Addr], families) {
	var vips []placed[netip.Addr]
	var f families
	items := t.oneOrMore("address", "203.0.113.10")
	s.Addresses = distinct(items, func(i item) (netip.Addr, bool) {
		a, ok := i.unicast()
		if ok && !f.has(a) || ok && !slices.ContainsFunc(vips, func(p placed[netip.Addr]) bool { return p.v == a }) {
			vips = append(vips, placed[netip.Addr]{a, i})
			f.note(a)
		}
		return a, ok
	})
	f.known = len(vips) == len(items) && len(items) > 0
	pool := d.servicePool(t, s)
	switch i := t.at("address"); {
	case !t.has("address") && !t.has("pool"):
		i.errorf(`write address = "203.0.113.10", or pool = "public"`, "missing")
	case t.has("address") && items != nil && len(items) == 0:
		i.errorf(`write one, like "203.0.113.10"`, "is empty")
	}
	for _, v := range vips {
		if d.notOwn(v) {
			d.inPool(v, pool, s)
		}
		if d.config.AnnouncesL2(s.Announce) && lb.IsSubnetRouterAnycast(v.v) {
			v.item.warnf("use a different address, unless no router has this prefix on the segment",
				"%s is the subnet-router anycast address (RFC 4291 §2.6.1), which routers use", v.v)
		}
	}
	if pool != nil && !t.has("address") {
		s.Announce = pool.Announce
		f.known = !d.pools.broken
		for _, r := range pool.Ranges {
			f.note(r.From)
		}
	}
	return vips, f
}

// addressPerNode reads address_per_node, which needs [l2] with members.
func (d *decoder) addressPerNode(t *table, s *Service) {
	s.AddressPerNode = t.boolean("address_per_node", false)
	of := map[bool]int{} // key: whether IPv4
	for _, a := range s.Addresses {
		of[a.Is4()]++
	}
	i := t.at("address_per_node")
	switch l := d.config.L2; {
	case !s.AddressPerNode:
	case !d.config.AnnouncesL2(s.Announce):
		i.warnf("leave it out", "has no effect: [l2] does not announce the service")
	case len(l.Members) == 0 && (d.config.Kubernetes == nil || len(s.Addresses) == 0):
		i.warnf("add l2.members, or leave it out", "has no effect without other members")
	case t.has("address") && max(of[true], of[false]) == 1:
		i.warnf("write several addresses, or write pool without address", "has no effect with one address")
	}
}

// servicePool reads the pool's name. It returns nil if the key is missing or no pool has that name.
func (d *decoder) servicePool(t *table, s *Service) *Pool {
	i, ok := t.get("pool")
	if !ok {
		return nil
	}
	name, ok := i.str("public")
	if !ok {
		return nil
	}
	s.Pool = name
	pool := d.poolNamed(name)
	if pool == nil && !d.pools.broken {
		hint := "pools: " + d.describePools()
		if len(d.config.Pools) == 0 {
			hint = "add a [[pool]]"
		} else if near := suggest(name, keysOf(d.pools.names)); near != "" {
			hint = fmt.Sprintf("did you mean %q?", near)
		}
		i.errorf(hint, "there is no pool %q", name)
	}
	return pool
}

// notOwn reports a VIP that is a node's own address. The datapath drops packets to a VIP that match no frontend, which
// would make that node unreachable.
func (d *decoder) notOwn(v placed[netip.Addr]) bool {
	for _, own := range d.own {
		if own.addr == v.v {
			v.item.errorf("use another address for the service", "%s is already %s", v.v, own.key)
			return false
		}
	}
	return true
}

// inPool checks that a VIP is in the named pool. Without a name, any pool will do, and with no pools, any address.
func (d *decoder) inPool(v placed[netip.Addr], named *Pool, s *Service) {
	if len(d.config.Pools) == 0 || d.pools.broken {
		return
	}
	p := d.poolOf(v.v)
	switch {
	case p == nil:
		v.item.errorf("pools: "+d.describePools(), "%s is in no pool", v.v)
		return
	case named != nil && p != named:
		v.item.errorf(fmt.Sprintf("write pool = %q, or leave pool out", p.Name),
			"%s is in the pool %q, not in %q", v.v, p.Name, named.Name)
		return
	case s.Addresses[0] == v.v:
		s.Announce = p.Announce
	case !sameKinds(s.Announce, p.Announce):
		v.item.errorf("create a service for each",
			"%s and %s are in pools that are announced differently", s.Addresses[0], v.v)
	}
}

func sameKinds(a, b []lb.AnnouncerKind) bool {
	a, b = slices.Sorted(slices.Values(a)), slices.Sorted(slices.Values(b))
	return slices.Equal(a, b)
}

// allowMeets warns about a VIP whose address family is missing from allow, because no client could connect to it.
func allowMeets(t *table, s *Service) {
	if len(s.Allow) == 0 {
		return
	}
	for _, vip := range s.Addresses {
		if !slices.ContainsFunc(s.Allow, func(p netip.Prefix) bool { return p.Addr().Is4() == vip.Is4() }) {
			t.at("allow").warnf("add a prefix of its family", "no source may connect to %s", vip)
		}
	}
}
