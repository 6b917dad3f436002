package config

import (
	"cmp"
	"crypto/x509"
	"fmt"
	"net/netip"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/steelyard-lb/steelyard/lb"
)

const checkForm = `write check = { type = "http", path = "/healthz" }`

func defaultCheck() lb.CheckSpec {
	return lb.CheckSpec{
		Type: lb.CheckTCP, Interval: 2 * time.Second, Timeout: time.Second, Rise: 2, Fall: 3,
		Status: []lb.StatusRange{{From: 200, To: 399}},
	}
}

// check reads the check of a service. check = "http" is short for check = { type = "http" }.
func (d *decoder) check(t *table, of *Service) lb.CheckSpec {
	ports := of.Ports
	i, given := t.get("check")
	var sub *table
	switch v := i.value.(type) {
	case map[string]any:
		sub = i.table(v)
	case string:
		sub = i.table(map[string]any{"type": v})
	default:
		if given {
			i.errorf(checkForm, "%s, but must be a table", i.what())
		}
		sub = i.table(nil)
	}
	c := defaultCheck()
	before := len(d.errs)
	c.Type = word(sub, "type", "check type", c.Type, lb.CheckTypes)
	if len(d.errs) > before {
		c.Type = lb.CheckNone // prevents errors about keys that the intended type may use
	}
	if !sub.has("type") {
		needType(sub, ports)
	}
	c.Port = integer(sub, "port", c.Port, 0, 65535)
	if c.Port == 0 {
		warnOtherProtocol(sub, c.Type, ports)
	}
	if c.Type == lb.CheckTCP && c.Port >= 30000 && c.Port <= 32767 && !of.uses(uint16(c.Port)) {
		sub.at("port").warnf(`write type = "health-check-node-port" if the port is one`,
			"a check of type tcp does not notice the response 503 of a health check node port")
	}
	c.ServicePort = portFor(c.Type, ports)
	c.Interval, c.Timeout = sub.rhythm(c.Interval, c.Timeout)
	c.Rise = integer(sub, "rise", c.Rise, 1, countMax)
	c.Fall = integer(sub, "fall", c.Fall, 1, countMax)
	if s, ok := sub.text("path", "/healthz", &c); ok {
		c.Path = s
	}
	c.User, _ = sub.text("user", "nobody", &c)
	c.Body, _ = sub.text("expect_body", "ok", &c)
	c.Send, _ = sub.text("send", "ping", &c)
	c.Host, _ = sub.text("host", "www.example.net", &c)
	c.TLSServerName, _ = sub.text("tls_server_name", "www.example.net", &c)
	if s, ok := sub.text("tls_ca_file", "/etc/steelyard/servers-ca.pem", &c); ok {
		c.TLSCA = sub.at("tls_ca_file").certificates(d.inDir(s))
	}
	if e, ok := sub.get("expect_status"); ok {
		if s, ok := e.statuses(); ok {
			c.Status = s
		}
		if e.value != "200-399" {
			e.onlyFor("expect_status", c.Type)
		}
	}
	checkKeys(sub, &c)
	sub.done()
	return c
}

// uses reports whether clients' packets are sent to port n of a backend.
func (s *Service) uses(n uint16) bool {
	return slices.ContainsFunc(s.Backends, func(b lb.Backend) bool { return b.Port == n }) ||
		slices.ContainsFunc(s.Ports, func(p lb.Port) bool { return n >= p.Target && n-p.Target <= p.End()-p.Port })
}

func byUDP(check lb.CheckType) bool { return check == lb.CheckUDP || check == lb.CheckDNS }

// byTCP reports whether an explicit check needs a TCP port of the service. A node port check has a port of its own.
func byTCP(check lb.CheckType) bool {
	return !byUDP(check) && check != lb.CheckNone && check != lb.CheckExec && check != lb.CheckNodePort
}

// warnOtherProtocol warns about probes with a protocol that clients do not use. Servers may still respond on the same
// port number, as DNS and HTTP/3 servers do over TCP. An explicit check.port turns off the warning.
func warnOtherProtocol(t *table, check lb.CheckType, ports []lb.Port) {
	has := func(p lb.Protocol) bool {
		return slices.ContainsFunc(ports, func(o lb.Port) bool { return o.Protocol == p })
	}
	const hint = "use another type, or set check.port if servers respond there to "
	switch {
	case len(ports) == 0 || !t.has("type"):
	case byUDP(check) && !has(lb.UDP):
		t.at("type").warnf(hint+"udp", "probes with udp, but the service has no udp port")
	case byTCP(check) && !has(lb.TCP):
		t.at("type").warnf(hint+"tcp", "probes with tcp, but the service has no tcp port")
	}
}

// portFor returns the first port that this check type can probe or, if there is none, the first port.
func portFor(check lb.CheckType, ports []lb.Port) lb.Port {
	want := lb.TCP
	if byUDP(check) {
		want = lb.UDP
	}
	for _, p := range ports {
		if p.Protocol == want {
			return p
		}
	}
	if len(ports) == 0 { // already reported by servicePorts
		return lb.Port{}
	}
	return ports[0]
}

// needType requires a type if the service has no tcp port, because the default type, tcp, would always fail.
func needType(t *table, ports []lb.Port) {
	isTCP := func(p lb.Port) bool { return p.Protocol == lb.TCP }
	if len(ports) == 0 || slices.ContainsFunc(ports, isTCP) || t.has("port") {
		return
	}
	t.at("type").errorf(
		`write check = { type = "dns", host = "example.net" }, or "udp" with send, or "none"`,
		"missing; the default, tcp, cannot probe a service without a tcp port")
}

// checkUses lists the types that use a key. Any other key is an error: a user who sets expect_body, for example,
// expects the response to be compared.
var checkUses = map[string][]lb.CheckType{
	"path":            {lb.CheckHTTP, lb.CheckHTTPS, lb.CheckHTTP2, lb.CheckGRPC, lb.CheckExec},
	"expect_status":   {lb.CheckHTTP, lb.CheckHTTPS, lb.CheckHTTP2},
	"expect_body":     {lb.CheckHTTP, lb.CheckHTTPS, lb.CheckHTTP2, lb.CheckUDP, lb.CheckDNS},
	"user":            {lb.CheckExec},
	"send":            {lb.CheckUDP},
	"host":            {lb.CheckHTTP, lb.CheckHTTPS, lb.CheckHTTP2, lb.CheckDNS, lb.CheckGRPC},
	"tls_server_name": {lb.CheckHTTPS, lb.CheckGRPC},
	"tls_ca_file":     {lb.CheckHTTPS, lb.CheckGRPC},
}

// onlyFor reports a key that the check type does not use. Type none accepts every key, so users can turn off a check
// without deleting its keys.
func (i item) onlyFor(key string, used lb.CheckType) bool {
	if used == lb.CheckNone || slices.Contains(checkUses[key], used) {
		return true
	}
	i.errorf("it is for "+lb.Words(checkUses[key]), "has no effect on a check of type %s", used)
	return false
}

// text reads a string that only some types use. "" counts as a missing key.
func (t *table) text(key, like string, c *lb.CheckSpec) (string, bool) {
	i, ok := t.get(key)
	if !ok || i.value == "" {
		return "", false
	}
	s, ok := i.str(like)
	if !ok || !i.onlyFor(key, c.Type) {
		return "", false
	}
	return s, true
}

// checkKeys checks the keys that each type needs, and fills in defaults.
func checkKeys(t *table, c *lb.CheckSpec) {
	path, host := t.at("path"), t.at("host")
	switch c.Type {
	case lb.CheckHTTP, lb.CheckHTTPS, lb.CheckHTTP2:
		if c.Path == "" {
			c.Path = "/"
		}
		if !strings.HasPrefix(c.Path, "/") || strings.ContainsAny(c.Path, " \t\r\n") {
			path.errorf(fmt.Sprintf("write %q", "/"+strings.Join(strings.Fields(strings.TrimLeft(c.Path, "/")), "%20")),
				"%q is not a request path", c.Path)
		}
	case lb.CheckExec:
		if !filepath.IsAbs(c.Path) {
			problem := "missing: an exec check runs this program"
			if c.Path != "" {
				problem = fmt.Sprintf("%q is not an absolute path", c.Path)
			}
			path.errorf(`write one like "/usr/lib/steelyard/check"`, "%s", problem)
		}
		c.User = cmp.Or(c.User, "nobody")
	case lb.CheckDNS:
		if c.Host == "" {
			host.errorf(`write one like "example.net"`, "missing: a dns check queries this name")
		}
	case lb.CheckNodePort:
		// kube-proxy serves /healthz on port 10256; other implementations respond on every path.
		c.Path = "/healthz"
		if c.Port == 0 {
			c.Port = 10256
		}
	}
	if c.Host != "" && c.Type != lb.CheckNone {
		name, _, _ := strings.Cut(c.Host, ":")
		_, err := netip.ParseAddr(c.Host)
		if err != nil && !hostName.MatchString(name) && !strings.HasPrefix(name, "[") {
			host.errorf(`write one like "www.example.net"`, "%q is not a host name", c.Host)
		}
	}
	if s := c.TLSServerName; s != "" {
		if _, err := netip.ParseAddr(s); err != nil && !hostName.MatchString(s) {
			t.at("tls_server_name").errorf(`write one like "www.example.net"`, "%q is not a host name", s)
		}
	}
	if c.TLSCA != "" && c.TLSServerName == "" && c.Host == "" {
		t.at("tls_ca_file").errorf("add tls_server_name",
			"names the certificate's authority, but no key gives the certificate's name")
	}
}

// certificates returns the CA certificates in a PEM file, or "" after an error.
func (i item) certificates(name string) string {
	if i.isElsewhere(name) {
		return ""
	}
	text, ok := i.file(name, 1<<20)
	if ok && !x509.NewCertPool().AppendCertsFromPEM(text) {
		i.errorf("name a file with certificates in PEM", "%s has no certificate", name)
		ok = false
	}
	if !ok {
		return ""
	}
	return string(text)
}

// statuses reads "200", "200-399" or "200,204,300-399".
func (i item) statuses() ([]lb.StatusRange, bool) {
	s, ok := i.digits("200-399")
	if !ok {
		return nil, false
	}
	var list []lb.StatusRange
	for part := range strings.SplitSeq(s, ",") {
		from, to, isRange := strings.Cut(strings.TrimSpace(part), "-")
		if !isRange {
			to = from
		}
		low, err1 := strconv.Atoi(from)
		high, err2 := strconv.Atoi(to)
		if err1 != nil || err2 != nil || low < 100 || high > 599 || low > high {
			i.errorf(`write one like "200", "200-399" or "200,301-308"; codes are 100 to 599`,
				"%q is not a list of HTTP status codes", s)
			return nil, false
		}
		list = append(list, lb.StatusRange{From: low, To: high})
	}
	return list, true
}
