package config

import (
	"crypto/tls"
	"fmt"
	"log/slog"
	"net"
	"net/netip"
	"path/filepath"
	"strconv"
)

// socketPathMax is sizeof(sockaddr_un.sun_path) without the NUL.
const socketPathMax = 107

func (d *decoder) admin(t *table) {
	a := &d.config.Admin
	if i, ok := t.get("socket"); ok {
		if s, ok := i.str(a.Socket); ok {
			switch {
			case !filepath.IsAbs(s):
				i.errorf(fmt.Sprintf("write one like %q", a.Socket), "%q is not an absolute path", s)
			case len(s) > socketPathMax:
				i.errorf("write at most 107", "a path of %d bytes is too long for a socket", len(s))
			}
			a.Socket = s
		}
	}
	if i, ok := t.get("listen"); ok && i.value != "" {
		a.Listen = d.listen(i)
	}
	a.Hosts = t.matching("hosts", "lb1.example.net", hostName, `write one like "lb1.example.net"`, "host name")
	if i, ok := t.get("token_file"); ok && i.value != "" {
		a.Token = t.secret("token_file", "/etc/steelyard/token", tokenMin, tokenMax)
	}
	a.Allow = distinct(t.list("allow", "192.0.2.0/24"), item.prefix)
	d.adminTLS(t, a)
	if a.Listen == "" || onLoopback(a.Listen) {
		return
	}
	given := func(key string) bool { return t.has(key) && t.values[key] != "" }
	switch {
	case given("token_file") && !given("tls_cert_file"):
		t.at("token_file").errorf("add tls_cert_file and tls_key_file, or listen on 127.0.0.1",
			"the token would be sent without encryption")
	case !given("token_file") && len(a.Allow) == 0:
		t.at("listen").warnf("add token_file or allow, or listen on 127.0.0.1",
			"every host that reaches %s can read the addresses of clients and servers", a.Listen)
	}
}

// Length in bytes. Even in hexadecimal, the shortest token has 64 bits.
const tokenMin, tokenMax = 16, 1024

// onLoopback reports whether a listen address accepts connections only from this machine.
func onLoopback(listen string) bool {
	at, err := netip.ParseAddrPort(listen)
	return err == nil && at.Addr().Unmap().IsLoopback()
}

// adminTLS reads the names of the certificate and key files and checks that the two match.
func (d *decoder) adminTLS(t *table, a *Admin) {
	if a.TLSCert = t.str("tls_cert_file", "/etc/steelyard/tls.crt"); a.TLSCert != "" {
		a.TLSCert = d.inDir(a.TLSCert)
	}
	if a.TLSKey = t.str("tls_key_file", "/etc/steelyard/tls.key"); a.TLSKey != "" {
		a.TLSKey = d.inDir(a.TLSKey)
	}
	switch {
	case a.TLSCert == "" && a.TLSKey == "":
		return
	case a.TLSCert == "":
		t.at("tls_key_file").errorf("add tls_cert_file", "has no certificate")
		return
	case a.TLSKey == "":
		t.at("tls_cert_file").errorf("add tls_key_file", "has no key")
		return
	}
	if t.at("tls_key_file").isElsewhere(a.TLSKey) || t.at("tls_cert_file").isElsewhere(a.TLSCert) {
		return
	}
	if _, ok := t.at("tls_key_file").secretFile(a.TLSKey); !ok {
		return
	}
	if _, err := tls.LoadX509KeyPair(a.TLSCert, a.TLSKey); err != nil {
		i := t.at("tls_cert_file")
		i.errorf("name a certificate and its key, in PEM", "%v", err)
		d.errs[len(d.errs)-1].cause = err
	}
}

// listen reads "address:port". Without an address it means all addresses, and the kernel chooses a port if it is 0.
func (d *decoder) listen(i item) string {
	const like = "127.0.0.1:9911"
	s, ok := i.str(like)
	if !ok {
		return ""
	}
	host, port, err := net.SplitHostPort(s)
	_, portErr := strconv.ParseUint(port, 10, 16)
	_, addrErr := netip.ParseAddr(host)
	if err != nil || portErr != nil || (host != "" && addrErr != nil) {
		i.errorf(fmt.Sprintf("write one like %q", like), "%q is not an IP address and a port", s)
		return ""
	}
	return s
}

var levels = map[string]slog.Level{
	"debug": slog.LevelDebug, "info": slog.LevelInfo, "warn": slog.LevelWarn, "error": slog.LevelError,
}

func (d *decoder) log(t *table) {
	l := &d.config.Log
	l.Level = levels[word(t, "level", "level", "info", []string{"debug", "info", "warn", "error"})]
	l.Format = word(t, "format", "format", l.Format, []string{"text", "json"})
}
