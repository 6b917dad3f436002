package agent

import (
	"fmt"
	"net"
	"net/netip"
	"slices"
	"testing"

	"github.com/vishvananda/netlink"

	"github.com/steelyard-lb/steelyard/lb"
	"github.com/steelyard-lb/steelyard/lb/agent/machine"
)

// calls is a lb.Sink that records.
type calls struct{ list []string }

func (c *calls) Put(s *lb.Service) {
	c.list = append(c.list, fmt.Sprintf("put %s %v, %d refused", s.Name, s.VIPs, len(s.Refused)))
}
func (c *calls) Delete(name string)     { c.list = append(c.list, "delete "+name) }
func (c *calls) Complete(source string) { c.list = append(c.list, "complete "+source) }

// A service loses an address that the machine or a node gets, and has it again afterwards.
func TestRefuser(t *testing.T) {
	having := func(addrs ...string) *machine.Network {
		var list []netlink.Addr
		for _, a := range addrs {
			list = append(list, netlink.Addr{IPNet: netlink.NewIPNet(net.ParseIP(a).To4())})
		}
		return machine.New(nil, list, nil)
	}
	out := &calls{}
	r := newRefuser(out, having("192.0.2.11"), nil, discard)
	change := func(n *machine.Network) { r.network = n; r.again() }
	r.Put(&lb.Service{Name: "web", VIPs: []netip.Addr{ip("203.0.113.10"), ip("192.0.2.11")}})
	r.Put(&lb.Service{Name: "mail", VIPs: []netip.Addr{ip("203.0.113.11")}})
	r.Complete("file")
	change(having("192.0.2.11", "192.0.2.13"))
	change(having("192.0.2.11", "203.0.113.10"))
	change(having())
	r.setNodes([]netip.Addr{ip("203.0.113.11")})
	r.setNodes([]netip.Addr{ip("203.0.113.11")})
	r.Delete("mail")
	r.setNodes(nil)
	want := []string{
		"put web [203.0.113.10], 1 refused", "put mail [203.0.113.11], 0 refused", "complete file",
		"put web [], 2 refused", "put web [203.0.113.10 192.0.2.11], 0 refused",
		"put mail [], 1 refused", "delete mail",
	}
	if !slices.Equal(out.list, want) {
		t.Errorf("calls %q; want %q", out.list, want)
	}
}
