// Package bgp announces VIPs to routers by BGP (RFC 4271, with RFC 4760 for IPv6), through an embedded gobgp server.
package bgp
