package config

import (
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
				i.errorf("at most 107", "a path of %d bytes is too long for a socket", len(s))
			}
			a.Socket = s
		}
	}
	if i, ok := t.get("listen"); ok && i.value != "" {
		a.Listen = d.listen(i)
	}
	a.Hosts = distinct(t.list("hosts", "lb1.example.net"), func(i item) (string, bool) {
		s, ok := i.str("lb1.example.net")
		if ok && !hostName.MatchString(s) {
			i.errorf(`write one like "lb1.example.net"`, "%q is not a host name", s)
			return "", false
		}
		return s, ok
	})
}

// listen reads "address:port"; without an address it listens on all. Port 0 lets the kernel choose.
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

// levels are the values of log.level.
var levels = map[string]slog.Level{
	"debug": slog.LevelDebug, "info": slog.LevelInfo, "warn": slog.LevelWarn, "error": slog.LevelError,
}

func (d *decoder) log(t *table) {
	l := &d.config.Log
	l.Level = levels[word(t, "level", "level", "info", []string{"debug", "info", "warn", "error"})]
	l.Format = word(t, "format", "format", l.Format, []string{"text", "json"})
}
