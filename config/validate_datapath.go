package config

import (
	"fmt"
	"strconv"
	"strings"
	"time"
	"unicode"
)

func (d *decoder) datapath(t *table) {
	c := &d.config.Datapath
	c.Interfaces = t.interfaces("interfaces")
	c.Mode = word(t, "mode", "mode", c.Mode, []string{ModeAuto, ModeXDP, ModeXDPGeneric, ModeTC})
	c.MaxFlows = integer(t, "max_flows", c.MaxFlows, 1, 100_000_000)
	if i, ok := t.get("snat_ports"); ok {
		if r, ok := i.portRange(); ok {
			c.SNATPorts = r
		}
	}
	c.TunnelPort = integer(t, "tunnel_port", c.TunnelPort, 1, 65535)
	if i := t.at("tunnel_port"); t.has("tunnel_port") || t.has("snat_ports") {
		d.notSNAT(i, c.TunnelPort)
	}
	c.TunnelSources = distinct(t.list("tunnel_sources", "192.0.2.11"), item.prefix)
	c.TunnelKeys, c.HashSeed = t.tunnelKeys("tunnel_key_file")
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
		t.at("established").warnf(`write at least "124m", or make sure that both sides send keepalives more often`,
			"connections that are idle for longer are cut (RFC 5382)")
	}
	return o
}

// notSNAT reports a listening port in snat_ports: packets to it would be handled as replies of a backend.
func (d *decoder) notSNAT(i item, port uint16) {
	if r := d.config.Datapath.SNATPorts; r[0] <= port && port <= r[1] {
		i.errorf(fmt.Sprintf("choose one outside %d-%d", r[0], r[1]), "%d is one of datapath.snat_ports", port)
	}
}

// portRange reads "61000-65535". Ports below 1024 are for services of the machine.
func (i item) portRange() (r [2]uint16, ok bool) {
	const like = "61000-65535"
	s, ok := i.str(like)
	if !ok {
		return r, false
	}
	from, to, ok := strings.Cut(s, "-")
	if !ok {
		i.errorf(fmt.Sprintf("write one like %q", like), "%q is not a range of ports", s)
		return r, false
	}
	for n, text := range []string{from, to} {
		port, err := strconv.ParseUint(strings.TrimSpace(text), 10, 16)
		if err != nil || port < 1024 {
			i.errorf(fmt.Sprintf("write one like %q", like), "%q in %q is not a port from 1024 to 65535", text, s)
			return r, false
		}
		r[n] = uint16(port)
	}
	if r[1] < r[0] {
		i.errorf(fmt.Sprintf(`write "%d-%d"`, r[1], r[0]), "%q ends before it begins", s)
		return r, false
	}
	return r, true
}

// interfaceNameMax is IFNAMSIZ without the NUL.
const interfaceNameMax = 15

func (t *table) interfaces(key string) []string {
	return distinct(t.list(key, "eth0"), func(i item) (string, bool) {
		s, ok := i.str("eth0")
		if !ok {
			return "", false
		}
		// As dev_valid_name in net/core/dev.c.
		if s == "" || s == "." || s == ".." || len(s) > interfaceNameMax || strings.ContainsAny(s, "/:") ||
			strings.IndexFunc(s, unicode.IsSpace) >= 0 {
			i.errorf("write one like \"eth0\", of at most 15 bytes", "%q is not the name of an interface", s)
			return "", false
		}
		return s, true
	})
}
