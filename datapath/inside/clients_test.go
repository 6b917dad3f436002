package inside

import (
	"context"
	"fmt"
	"net/netip"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/steelyard-lb/steelyard/e2e/lab"
	"github.com/steelyard-lb/steelyard/e2e/lab/labtest"
	"github.com/steelyard-lb/steelyard/e2e/lab/traffic"
	"github.com/steelyard-lb/steelyard/lb"
	"github.com/steelyard-lb/steelyard/lb/lbtest/must"
)

// machine adds a pod behind a TAP or TUN device, whose frames a process passes on, as for a virtual machine. The device
// is a port of the bridge cni0, or routed. TUN devices have no Ethernet header.
func (n *network) machine(t *testing.T, name string, i int, mode uint16, bridged, offload bool) {
	t.Helper()
	h, device := labtest.Host(t, n.lab, name), "vm-"+name
	outer, inner := must.Get(n.node.Tun(device, mode))(t), must.Get(h.Tun("eth0", mode))(t)
	if offload {
		must.Do(t, lab.Offload(outer))
		must.Do(t, lab.Offload(inner))
	}
	lab.Cable(outer, inner)
	gateway4, gateway6 := netip.MustParseAddr("10.244.2.1"), netip.MustParseAddr("fd00:244:2::1")
	p := &pod{Host: h, v4: netip.AddrFrom4([4]byte{10, 244, 2, byte(i)}),
		v6: netip.MustParseAddr(fmt.Sprintf("fd00:244:2::%x", i))}
	if bridged {
		must.Get(n.node.Run(t.Context(), "ip", "link", "set", device, "master", "cni0"))(t)
	} else {
		gateway4 = netip.AddrFrom4([4]byte{10, 244, 1, byte(4*i + 1)})
		gateway6 = netip.MustParseAddr(fmt.Sprintf("fd00:244:1:%x::1", i))
		p.v4, p.v6 = gateway4.Next(), gateway6.Next()
		must.Do(t, n.node.AddAddress(device, netip.PrefixFrom(gateway4, 30)))
		must.Do(t, n.node.AddAddress(device, netip.PrefixFrom(gateway6, 64)))
	}
	bits := map[bool]int{true: 24, false: 30}[bridged]
	must.Do(t, h.AddAddress("eth0", netip.PrefixFrom(p.v4, bits)))
	must.Do(t, h.AddAddress("eth0", netip.PrefixFrom(p.v6, 64)))
	n.serve(t, name, p, gateway4, gateway6)
}

// Every kind of client reaches endpoints at every place, including itself, with and without br_netfilter, and whether
// checksums are complete or left to the interface. Connection tracking calls no packet invalid.
func TestServices(t *testing.T) {
	t.Parallel()
	for filtered, offload := range map[string]bool{"1": true, "0": false} {
		t.Run(fmt.Sprintf("br_netfilter %s, offload %v", filtered, offload), func(t *testing.T) {
			t.Parallel()
			n := newNetwork(t)
			n.machine(t, "v1", 10, unix.IFF_TAP, false, offload)
			n.machine(t, "v2", 11, unix.IFF_TAP, true, offload)
			n.machine(t, "u1", 12, unix.IFF_TUN, false, offload)
			must.Do(t, n.node.Sysctl(map[string]string{
				"net.bridge.bridge-nf-call-iptables": filtered, "net.bridge.bridge-nf-call-ip6tables": filtered}))
			endpoints := []string{"p1", "p2", "b1", "b2", "q1", "v1", "v2", "u1"}
			p := startProxy(t, n.node, "eth0")
			var rules []lb.NodeRule
			for i, e := range endpoints {
				if veth := i < 5; veth && !offload {
					must.Do(t, n.pods[e].SoftwareChecksums("eth0"))
				}
				for _, is4 := range []bool{true, false} {
					rules = append(rules, n.rule(e+":http", clusterIP(is4, 10+i), 80, lb.TCP, e),
						n.rule(e+":dns", clusterIP(is4, 10+i), 53, lb.UDP, e))
				}
			}
			p.apply(rules...)
			clients := map[string]*lab.Host{"node": n.node}
			for _, name := range []string{"p1", "b1", "v1", "v2", "u1"} {
				clients[name] = n.pods[name].Host
			}
			for name, h := range clients {
				for i, e := range endpoints {
					for _, is4 := range []bool{true, false} {
						t.Run(fmt.Sprintf("%s to %s %v", name, e, is4), func(t *testing.T) {
							exchange(t, h, clusterIP(is4, 10+i), e)
						})
					}
				}
			}
			filter := must.Get(n.node.Run(t.Context(), "nft", "list", "table", "inet", "test"))(t)
			must.True(t, strings.Count(filter, "counter packets 0 bytes 0 drop") == 2, "invalid packets:\n%s", filter)
		})
	}
}

// exchange sends requests by TCP and datagrams, small and fragmented, to a service of one endpoint.
func exchange(t *testing.T, h *lab.Host, to netip.Addr, endpoint string) {
	t.Helper()
	c := traffic.From(h)
	url := fmt.Sprintf("http://%s/", netip.AddrPortFrom(to, 80))
	r := c.Load(t.Context(), traffic.Load{URL: url, Requests: 10, Timeout: 10 * time.Second})
	if err := r.Err(); err != nil || r.Servers[endpoint] != 10 {
		t.Errorf("TCP: %v, %s", err, r)
	}
	for _, size := range []int{20, 3000} {
		u := c.UDP(t.Context(), netip.AddrPortFrom(to, 53), 5, size, 5*time.Second)
		if err := u.Err(); err != nil || u.Servers[endpoint] != 5 {
			t.Errorf("UDP, %d bytes: %v, %s", size, err, u)
		}
	}
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
	defer cancel()
	if _, err := c.Upload(ctx, url, 1<<20); err != nil {
		t.Errorf("a stream: %v", err)
	}
}
