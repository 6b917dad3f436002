package lb

import (
	"cmp"
	"fmt"
	"net/netip"
	"reflect"
	"slices"
	"strings"
)

// Change is one difference between two configurations. The field names are a contract (docs/api.md).
type Change struct {
	Op     ChangeOp `json:"op"`
	Object string   `json:"object"` // "service web" or "backend 10.0.0.21 of web"
	Text   string   `json:"text,omitempty"`
	// Connections is how many established connections the change ends, up to ConnectionsMax.
	Connections int `json:"connections,omitempty"`
	// Ends selects the connections that the change ends. The zero value means none.
	Ends FlowFilter `json:"-"`
}

// ChangeOp is what happens to an object.
type ChangeOp string

const (
	Added   ChangeOp = "+"
	Removed ChangeOp = "-"
	Changed ChangeOp = "~"
)

// ConnectionsMax is where Change.Connections stops counting.
const ConnectionsMax = 100_000

// String returns a line such as "- service web: 203.0.113.10; 80/tcp; 2 backends; ends 12 connections".
func (c Change) String() string {
	line := string(c.Op) + " " + c.Object
	if c.Text != "" {
		line += ": " + c.Text
	}
	switch {
	case c.Connections >= ConnectionsMax:
		line += fmt.Sprintf("; ends at least %d connections", c.Connections)
	case c.Connections > 0:
		line += "; ends " + plural(c.Connections, "connection")
	}
	return line
}

// Changes returns the differences between two lists of services, in the order of their names.
func Changes(before, after []*Service) (all []Change) {
	was, is := servicesByName(before), servicesByName(after)
	var names []string
	for name, b := range is {
		if was[name] != b {
			names = append(names, name)
		}
	}
	for name := range was {
		if is[name] == nil {
			names = append(names, name)
		}
	}
	slices.Sort(names)
	for _, name := range names {
		a, b := was[name], is[name]
		switch {
		case a == nil:
			all = append(all, Change{Op: Added, Object: "service " + name, Text: b.summary()})
		case b == nil:
			all = append(all, Change{
				Op: Removed, Object: "service " + name, Text: a.summary(), Ends: FlowFilter{Service: name},
			})
		default:
			all = append(all, changesOf(a, b)...)
		}
	}
	return all
}

func servicesByName(list []*Service) map[string]*Service {
	m := make(map[string]*Service, len(list))
	for _, s := range list {
		m[s.Name] = s
	}
	return m
}

// summary lists the service's addresses, its ports, and the number of its backends.
func (s *Service) summary() string {
	var vips, ports []string
	for _, vip := range s.VIPs {
		vips = append(vips, vip.String())
	}
	for _, p := range s.Ports {
		ports = append(ports, p.Name())
	}
	return fmt.Sprintf("%s; %s; %s", strings.Join(vips, ", "), strings.Join(ports, ", "),
		plural(len(s.backends()), "backend"))
}

func plural(n int, what string) string {
	if n != 1 {
		what += "s"
	}
	return fmt.Sprintf("%d %s", n, what)
}

// backends returns the backends of all ports.
func (s *Service) backends() map[netip.AddrPort]Backend {
	all := map[netip.AddrPort]Backend{}
	for _, p := range s.Ports {
		for _, b := range p.Backends {
			all[b.ID()] = b
		}
	}
	return all
}

// changesOf returns the differences between two versions of a service.
func changesOf(a, b *Service) []Change {
	if reflect.DeepEqual(a, b) {
		return nil
	}
	var all []Change
	if text := settingsChanged(a, b); text != "" {
		c := Change{Op: Changed, Object: "service " + a.Name, Text: text}
		if (a.Method == MethodNAT) != (b.Method == MethodNAT) {
			c.Ends = FlowFilter{Service: a.Name}
		}
		all = append(all, c)
	}
	all = append(all, parts(a.Name, "address", setOf(a.VIPs), setOf(b.VIPs), nil,
		func(vip netip.Addr) FlowFilter { return FlowFilter{Address: vip} })...)
	all = append(all, parts(a.Name, "port", a.ports(), b.ports(), Port.changed,
		func(p portName) FlowFilter { return FlowFilter{Port: p.port} })...)
	all = append(all, parts(a.Name, "backend", a.backends(), b.backends(), Backend.changed,
		func(id netip.AddrPort) FlowFilter { return FlowFilter{Backend: id.Addr()} })...)
	if all == nil {
		all = []Change{{Op: Changed, Object: "service " + a.Name}}
	}
	return all
}

// parts returns the differences between two sets of parts of a service. changed describes the difference between two
// parts with the same name. ends selects the service's connections that end when a part is removed.
func parts[K interface {
	comparable
	fmt.Stringer
}, V any](
	service, kind string, was, is map[K]V, changed func(a, b V) string, ends func(K) FlowFilter,
) (all []Change) {
	for k, a := range was {
		c := Change{Object: fmt.Sprintf("%s %s of %s", kind, name(k), service)}
		b, stays := is[k]
		switch {
		case !stays:
			c.Op, c.Ends = Removed, ends(k)
			c.Ends.Service = service
		case changed == nil:
			continue
		default:
			if c.Op, c.Text = Changed, changed(a, b); c.Text == "" {
				continue
			}
		}
		all = append(all, c)
	}
	for k := range is {
		if _, had := was[k]; !had {
			all = append(all, Change{Op: Added, Object: fmt.Sprintf("%s %s of %s", kind, name(k), service)})
		}
	}
	slices.SortFunc(all, func(x, y Change) int { return cmp.Compare(x.Object, y.Object) })
	return all
}

// name returns the name of a part. A backend without its own port is named by its address.
func name(k fmt.Stringer) string {
	if id, ok := k.(netip.AddrPort); ok && id.Port() == 0 {
		return id.Addr().String()
	}
	return k.String()
}

func setOf(vips []netip.Addr) map[netip.Addr]bool {
	set := map[netip.Addr]bool{}
	for _, vip := range vips {
		set[vip] = true
	}
	return set
}

// portName identifies a port of a service.
type portName struct {
	port uint16
	name string
}

func (p portName) String() string { return p.name }

func (s *Service) ports() map[portName]Port {
	all := map[portName]Port{}
	for _, p := range s.Ports {
		all[portName{p.Port.Port, p.Name()}] = p.Port
	}
	return all
}

// changed describes the difference between two versions of a port, or returns "" if they are equal.
func (p Port) changed(next Port) string { return arrow("backend port", p.Target, next.Target) }

// changed describes the difference between two versions of a backend, or returns "" if they are equal.
func (b Backend) changed(next Backend) string {
	return joined(arrow("weight", b.Weight, next.Weight), arrow("drain", b.Drain, next.Drain))
}

// settingsChanged describes differences other than addresses, ports and backends, in the words of the configuration.
func settingsChanged(a, b *Service) string {
	check, next := a.Check, b.Check
	check.ServicePort, next.ServicePort = Port{}, Port{} // follows from the ports
	text := joined(
		arrow("forward", a.Method, b.Method), arrow("tunnel", a.Encap, b.Encap), arrow("snat", !a.KeepSource,
			!b.KeepSource), arrow("algorithm", a.Algorithm, b.Algorithm), arrow("affinity", a.Affinity, b.Affinity),
		arrow("allow", a.Allow, b.Allow), arrow("min_healthy", a.MinHealthy, b.MinHealthy),
		arrow("keep when all are down", a.KeepAllDown, b.KeepAllDown),
		arrow("keep when none answers", a.KeepUnanswered, b.KeepUnanswered),
		arrow("keep flows of backends that are down", a.KeepDown, b.KeepDown),
		arrow("announce", a.Announce, b.Announce),
		arrow("check", check.Type, next.Type),
	)
	if check.Type == next.Type && !reflect.DeepEqual(check, next) {
		text = joined(text, "check")
	}
	return text
}

// arrow returns "NAME A -> B", or "" if a and b are equal.
func arrow(name string, a, b any) string {
	x, y := cmp.Or(fmt.Sprint(a), `""`), cmp.Or(fmt.Sprint(b), `""`)
	if x == y {
		return ""
	}
	return fmt.Sprintf("%s %s -> %s", name, x, y)
}

func joined(texts ...string) string {
	return strings.Join(slices.DeleteFunc(texts, func(s string) bool { return s == "" }), ", ")
}
