package config

import (
	"fmt"
	"net/netip"
	"strconv"
	"strings"

	"github.com/steelyard-lb/steelyard/lb"
)

const portForm = "write frontend[:backend][/tcp|udp|sctp], like \"80:8080\", \"53/udp\" or \"8000-8999\""

func (d *decoder) servicePorts(t *table) []placed[lb.Port] {
	var ports []placed[lb.Port]
next:
	for _, e := range t.some("ports", "80:8080", `write ports = ["80:8080"]`) {
		p, ok := e.port()
		if !ok {
			continue
		}
		for _, o := range ports {
			switch {
			case !o.v.Overlaps(p):
				continue
			case o.v.Port == p.Port && o.v.Last == p.Last:
				e.errorf("remove one of the two", "%s is listed twice", p.Name())
			default:
				e.errorf("list each port once", "%s overlaps with %s", p.Name(), o.v.Name())
			}
			continue next
		}
		ports = append(ports, placed[lb.Port]{p, e})
	}
	return ports
}

// port reads "80", "80:8080", "53/udp", "53:5353/udp", and ranges: "8000-8999", "8000-8999:9000".
func (i item) port() (lb.Port, bool) {
	p := lb.Port{Protocol: lb.TCP}
	s, ok := i.digits("80:8080")
	if !ok {
		return p, false
	}
	numbers, protocol, hasProtocol := strings.Cut(s, "/")
	if hasProtocol {
		if p.Protocol.UnmarshalText([]byte(protocol)) != nil {
			i.errorf("allowed: tcp, udp, sctp", "unknown protocol %q in %q", protocol, s)
			return p, false
		}
	}
	front, back, hasBack := strings.Cut(numbers, ":")
	first, last, ok := i.ports(s, front)
	if !ok {
		return p, false
	}
	target, end := first, last
	if hasBack {
		if target, end, ok = i.ports(s, back); !ok {
			return p, false
		}
		if size := last - first; target == end && target+size <= 65535 {
			end = target + size // the hint shows only the first port
		}
	}
	if end-target != last-first {
		like := min(target, 65535-(last-first))
		i.errorf(fmt.Sprintf("write the start of the backends' range, like \"%s:%d\"", front, like),
			"%q has %d ports on one side and %d on the other", s, last-first+1, end-target+1)
		return p, false
	}
	p.Port, p.Target = uint16(first), uint16(target)
	if last > first {
		p.Last = uint16(last)
	}
	return p, true
}

// ports reads part, "80" or "8000-8999". Errors quote s, which contains it.
func (i item) ports(s, part string) (first, last uint64, ok bool) {
	from, to, isRange := strings.Cut(part, "-")
	if !isRange {
		to = from
	}
	for _, n := range []struct {
		to   *uint64
		text string
	}{{&first, from}, {&last, to}} {
		v, err := strconv.ParseUint(n.text, 10, 64)
		if err != nil {
			i.errorf(portForm, "%q is not a port", s)
			return 0, 0, false
		}
		if v < 1 || v > 65535 {
			i.errorf("allowed: 1 to 65535", "%d in %q is out of range", v, s)
			return 0, 0, false
		}
		*n.to = v
	}
	if last < first {
		i.errorf(fmt.Sprintf(`write "%d-%d"`, last, first), "%q in %q ends before it begins", part, s)
		return 0, 0, false
	}
	return first, last, true
}

// claim is a port of a VIP that a service uses.
type claim struct {
	port         lb.Port
	path, object string
}

// claimFrontends reports frontends already used by an earlier service in the file.
func (d *decoder) claimFrontends(vips []placed[netip.Addr], ports []lb.Port) {
	for _, v := range vips {
		path, _, _ := strings.Cut(v.item.where(), ".")
		for _, p := range ports {
			for _, c := range d.claims[v.v] {
				if c.port.Overlaps(p) {
					f := c.port.On(v.v)
					v.item.errorf("use another address or port",
						"%s belongs to %s (%s) on line %d", f, c.path, c.object, d.line(c.path))
				}
			}
		}
		for _, p := range ports {
			d.claims[v.v] = append(d.claims[v.v], claim{p, path, v.item.object})
		}
	}
}

// rangesMeet reports backends with a port of their own in a service with a port range, because one port cannot serve
// it.
func rangesMeet(ports []placed[lb.Port], backends []placed[lb.Backend]) {
	for _, p := range ports {
		if p.v.Last == 0 {
			continue
		}
		for _, b := range backends {
			if b.v.Port != 0 {
				b.item.errorf(
					"leave its port out; ports sets the start of the backends' range, like \"8000-8999:9000\"",
					"port %d cannot serve all of %s", b.v.Port, p.v.Name())
			}
		}
	}
}
