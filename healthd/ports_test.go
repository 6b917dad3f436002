package healthd

import (
	"net"
	"net/netip"
	"strings"
	"testing"

	"github.com/steelyard-lb/steelyard/lb"
	"github.com/steelyard-lb/steelyard/lb/lbtest/must"
)

// A port is in use at the addresses to which clients of a listening process can connect.
func TestPortUser(t *testing.T) {
	const loopback, other, v6 = "127.0.0.1", "192.0.2.1", "2001:db8::1"
	for _, tt := range []struct {
		listen         string
		used, unused   []string
		network, other lb.Protocol
	}{
		{"127.0.0.1:0", []string{loopback}, []string{other, v6}, lb.TCP, lb.UDP},
		{"0.0.0.0:0", []string{loopback, other}, []string{v6}, lb.TCP, lb.SCTP},
		{"[::]:0", []string{loopback, other, v6}, nil, lb.TCP, lb.SCTP},
		{"0.0.0.0:0", []string{loopback, other}, []string{v6}, lb.UDP, lb.SCTP},
	} {
		var at net.Addr
		if tt.network == lb.TCP {
			network := "tcp"
			if strings.HasPrefix(tt.listen, "0") {
				network = "tcp4"
			}
			l := must.Get(net.Listen(network, tt.listen))(t)
			defer l.Close()
			at = l.Addr()
		} else {
			l := must.Get(net.ListenPacket("udp4", tt.listen))(t)
			defer l.Close()
			at = l.LocalAddr()
		}
		port := netip.MustParseAddrPort(at.String()).Port()
		is := func(addr string, p lb.Protocol) bool {
			return strings.HasPrefix(PortUser(netip.AddrPortFrom(netip.MustParseAddr(addr), port), p), "a process")
		}
		for _, addr := range tt.used {
			must.True(t, is(addr, tt.network), "%s %s is free at %s", tt.network, at, addr)
			must.True(t, !is(addr, tt.other), "%s %s is used by %s at %s", tt.network, at, tt.other, addr)
		}
		for _, addr := range tt.unused {
			must.True(t, !is(addr, tt.network), "%s %s is used at %s", tt.network, at, addr)
		}
	}
	must.Row(t, "a port of no socket", "", PortUser(netip.MustParseAddrPort("127.0.0.1:7"), lb.TCP))
}

func TestWithin(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct {
		list string
		port uint16
		want bool
	}{
		{"32768-60999", 32768, true}, {"32768-60999", 60999, true}, {"32768-60999", 61000, false},
		{"32768-60999", 32767, false}, {"80,8080-8090", 80, true}, {"80,8080-8090", 8085, true},
		{"80,8081", 8080, false}, {"", 0, false}, {"", 80, false},
	} {
		must.True(t, within(tt.list, tt.port) == tt.want, "%d in %q: want %v", tt.port, tt.list, tt.want)
	}
}
