package healthd

import (
	"cmp"
	"crypto/tls"
	"crypto/x509"
	"net"

	"github.com/steelyard-lb/steelyard/lb"
)

// tlsConfig returns a check's TLS configuration. It verifies the certificate only if the check has a server name or a
// CA, because the target is an address. It always sends Host, because servers with several certificates choose one by
// that name (RFC 6066 server_name).
func tlsConfig(s lb.CheckSpec) *tls.Config {
	host := s.Host
	if name, _, err := net.SplitHostPort(host); err == nil {
		host = name
	}
	c := &tls.Config{ServerName: cmp.Or(s.TLSServerName, host)}
	if s.TLSCA != "" {
		c.RootCAs = x509.NewCertPool()
		c.RootCAs.AppendCertsFromPEM([]byte(s.TLSCA))
	}
	c.InsecureSkipVerify = s.TLSServerName == "" && s.TLSCA == ""
	return c
}
