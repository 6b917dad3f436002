package config

import (
	"fmt"
	"strconv"
	"strings"
	"time"
)

func (d *decoder) datapath(t *table) {
	c := &d.config.Datapath
	c.Interfaces = t.interfaces("interfaces")
	c.Mode = word(t, "mode", "mode", c.Mode, []string{ModeAuto, ModeXDP, ModeXDPGeneric, ModeTC})
	c.MaxFlows = integer(t, "max_flows", c.MaxFlows, 1, 100_000_000)
	if i, ok := t.get("snat_ports"); ok {
		if r, ok := i.portRanges(); ok {
			c.SNATPorts = r
		}
	}
	c.TunnelPort = integer(t, "tunnel_port", c.TunnelPort, 1, 65535)
	c.TunnelSources = distinct(t.list("tunnel_sources", "192.0.2.11"), item.prefix)
	c.TunnelKeys, c.HashSeed = t.tunnelKeys("tunnel_key_file")
	c.LocalClients = t.boolean("local_clients", c.LocalClients)
	c.AllowUntestedKernel = t.boolean("allow_untested_kernel", false)
	if sub := t.sub("timeouts"); sub != nil {
		c.Timeouts = sub.timeouts(c.Timeouts)
		sub.done()
	}
}

const (
	flowTimeoutMin = time.Second
	flowTimeoutMax = 7 * 24 * time.Hour
	natMin         = 124 * time.Minute // RFC 5382, REQ-5
)

func (t *table) timeouts(def Timeouts) Timeouts {
	read := func(key string, def time.Duration) time.Duration {
		return t.duration(key, def, flowTimeoutMin, flowTimeoutMax)
	}
	o := Timeouts{
		HalfOpen: read("half_open", def.HalfOpen), Established: read("established", def.Established),
		Closing: read("closing", def.Closing), Closed: read("closed", def.Closed), UDP: read("udp", def.UDP),
	}
	if o.Established < natMin {
		t.at("established").warnf(`write at least "124m", or ensure that both sides send keepalives more often`,
			"connections that are idle for longer are ended (RFC 5382)")
	}
	return o
}

// portRangesMax is the capacity of the datapath programs' list of ranges.
const portRangesMax = 8

// portRanges reads "1024-32767,61000-65535". Ports below 1024 are reserved for local services.
func (i item) portRanges() (ranges []PortRange, ok bool) {
	const like = "1024-32767,61000-65535"
	s, ok := i.str(like)
	if !ok {
		return nil, false
	}
	texts := strings.Split(s, ",")
	if len(texts) > portRangesMax {
		i.errorf(fmt.Sprintf("write at most %d", portRangesMax), "%d ranges are too many", len(texts))
		return nil, false
	}
	for _, text := range texts {
		r, ok := i.portRange(strings.TrimSpace(text), like)
		if !ok {
			return nil, false
		}
		for _, other := range ranges {
			if r.First <= other.Last && other.First <= r.Last {
				i.errorf("write each port once", "%s overlaps %s", r, other)
				return nil, false
			}
		}
		ranges = append(ranges, r)
	}
	return ranges, true
}

func (i item) portRange(s, like string) (r PortRange, ok bool) {
	from, to, ok := strings.Cut(s, "-")
	if !ok {
		i.errorf(fmt.Sprintf("write one like %q", like), "%q is not a range of ports", s)
		return r, false
	}
	for _, end := range []struct {
		text string
		port *uint16
	}{{from, &r.First}, {to, &r.Last}} {
		n, err := strconv.ParseUint(strings.TrimSpace(end.text), 10, 16)
		if err != nil || n < 1024 {
			i.errorf(fmt.Sprintf("write one like %q", like), "%q in %q is not a port from 1024 to 65535", end.text, s)
			return r, false
		}
		*end.port = uint16(n)
	}
	if r.Last < r.First {
		i.errorf(fmt.Sprintf(`write "%d-%d"`, r.Last, r.First), "%q ends before it begins", s)
		return r, false
	}
	return r, true
}

// interfaceNameMax is IFNAMSIZ without the NUL.
const interfaceNameMax = 15

func (t *table) interfaces(key string) []string {
	return distinct(t.list(key, "eth0"), item.interfaceName)
}
