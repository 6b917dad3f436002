package healthd

import (
	"cmp"
	"crypto/tls"
	"crypto/x509"
	"net"

	"github.com/steelyard-lb/steelyard/lb"
)

// tlsConfig returns a check's TLS configuration. It verifies the certificate only if the check gives a server name or a
// CA, because the target is an address. Servers with several certificates choose by the name that is sent (RFC 6066
// server_name), so Host is sent in any case.
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
