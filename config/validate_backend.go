package config

import (
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strconv"

	"github.com/steelyard-lb/steelyard/lb"
)

const defaultWeight = 1

func keysOf(m map[string]string) []string { return slices.Sorted(maps.Keys(m)) }

func (d *decoder) backends(t *table) []placed[lb.Backend] {
	items := t.some("backends", "10.0.0.21",
		`write backends = ["10.0.0.21", "10.0.0.22"]; set drain = true on one that should get no connections`)
	backends := make([]placed[lb.Backend], 0, len(items))
	for _, e := range items {
		b, ok := e.backend()
		if !ok {
			continue
		}
		if slices.ContainsFunc(backends, func(o placed[lb.Backend]) bool { return o.v.ID() == b.ID() }) {
			e.errorf("remove one of the two, or increase the weight of the other",
				"%s is listed twice", describeBackend(b))
			continue
		}
		backends = append(backends, placed[lb.Backend]{b, e})
	}
	return backends
}

func describeBackend(b lb.Backend) string {
	if b.Port == 0 {
		return b.Addr.String()
	}
	return b.ID().String()
}

// backend reads "10.0.0.21", "10.0.0.21:9000" or a table.
func (i item) backend() (lb.Backend, bool) {
	b := lb.Backend{Weight: defaultWeight}
	switch v := i.value.(type) {
	case string:
		if ap, err := netip.ParseAddrPort(v); err == nil && ap.Port() != 0 {
			i.value = ap.Addr().String()
			b.Port = ap.Port()
		}
		var ok bool
		b.Addr, ok = i.unicast()
		return b, ok
	case map[string]any:
		t := i.table(v)
		a, ok := t.need("address", `write address = "10.0.0.21"`)
		if ok {
			b.Addr, ok = a.unicast()
		}
		b.Port = integer(t, "port", b.Port, 0, 65535)
		b.Weight = integer(t, "weight", b.Weight, 0, lb.MaxWeight)
		b.Drain = t.boolean("drain", false)
		t.done()
		return b, ok
	default:
		i.errorf(`write "10.0.0.21", or { address = "10.0.0.21", weight = 3 }`,
			"%s, but must be an address or a table", i.what())
		return b, false
	}
}

// unused reports whether b accepts no new connections.
func unused(b lb.Backend) bool { return b.Drain || b.Weight == 0 }

// minHealthy reads min_healthy, which must not exceed the number of backends, or the address would never be announced.
// It applies to each family separately. Backends that accept no new connections do not count.
func minHealthy(t *table, s *Service, f families) int {
	n := integer(t, "min_healthy", s.MinHealthy, 1, 65535)
	for _, c := range []struct {
		on, is4 bool
		name    string
	}{{f.v4, true, "IPv4"}, {f.v6, false, "IPv6"}} {
		of := slices.DeleteFunc(slices.Clone(s.Backends), func(b lb.Backend) bool { return b.Addr.Is4() != c.is4 })
		if len(of) == 0 && s.Method == lb.MethodTunnel {
			of = slices.Clone(s.Backends) // including the other family
		}
		have := len(of)
		used := len(slices.DeleteFunc(of, unused))
		if c.on && used > 0 && used < n && n <= have {
			t.at("min_healthy").warnf("write at most "+strconv.Itoa(used)+", or set weight and drain = false on others",
				"%d is more than the %s backends that accept new connections: %d of %d", n, c.name, used, have)
		}
		if c.on && have > 0 && n > have {
			t.at("min_healthy").errorf("write at most "+strconv.Itoa(have),
				"%d is more than the number of %s backends, so the address would never be announced", n, c.name)
		}
	}
	return n
}

// checkFamilies reports backends without a VIP of their family, VIPs without a backend of their family, and backends
// whose address is a VIP of the service. A tunnel can carry either family over either.
func checkFamilies(vips []placed[netip.Addr], backends []placed[lb.Backend], f families, method lb.Method) {
	for _, b := range backends {
		if slices.ContainsFunc(vips, func(v placed[netip.Addr]) bool { return v.v == b.v.Addr }) {
			b.item.errorf("write the address of a server", "%s is an address of the service itself", b.v.Addr)
		}
		if f.known && !f.has(b.v.Addr) && method != lb.MethodTunnel {
			b.item.errorf(fmt.Sprintf("give the service an %s address, or remove the backend", family(b.v.Addr)),
				"%s is %s, and the service has no such address", b.v.Addr, family(b.v.Addr))
		}
	}
	for _, v := range vips {
		sameFamily := func(b placed[lb.Backend]) bool { return b.v.Addr.Is4() == v.v.Is4() }
		if len(backends) == 0 || method == lb.MethodTunnel || slices.ContainsFunc(backends, sameFamily) {
			continue
		}
		v.item.errorf(fmt.Sprintf("add %s backends, or remove the address", family(v.v)),
			"%s is %s, and the service has no such backend", v.v, family(v.v))
	}
}

func family(a netip.Addr) string {
	if a.Is4() {
		return "IPv4"
	}
	return "IPv6"
}

// samePorts reports port mappings with dsr and tunnel, which do not change the destination port.
func samePorts(ports []placed[lb.Port], backends []placed[lb.Backend], method lb.Method) {
	if method == lb.MethodNAT {
		return
	}
	for _, p := range ports {
		if p.v.Port != p.v.Target {
			p.item.errorf(fmt.Sprintf(`write %q, or forward = "nat"`, p.v.Name()),
				"forward = %q cannot change the port", method)
		}
	}
	for _, b := range backends {
		if b.v.Port == 0 || len(ports) == 1 && ports[0].v.Port == b.v.Port {
			continue
		}
		b.item.errorf(`leave its port out, or write forward = "nat"`,
			"forward = %q cannot change the port to %d", method, b.v.Port)
	}
}
