package verify

import (
	"fmt"
	"net/netip"
	"slices"

	"golang.org/x/sys/unix"

	"github.com/steelyard-lb/steelyard/datapath/internal/bpf"
	"github.com/steelyard-lb/steelyard/datapath/internal/route"
)

// An interface that is set down loses its routes; one that loses its carrier keeps them. Both are the same fault.

const (
	noRoute   = "no_route"
	leadsDown = "%s, which leads to %s, is down"
)

// noWay returns why there is no route to the backend of a verdict.
func (v *Verifier) noWay(x bpf.Explained, what string) string {
	way := v.Services.Way(x.V.Backend)
	if nic := way.Certain.NIC; nic != 0 && v.view.IsDown(nic) {
		return fmt.Sprintf(leadsDown, v.view.Name(uint32(nic)), way.At.Addr())
	}
	return fmt.Sprintf("packets are not %s: %s: %s%s", what, noRoute, v.Meaning(noRoute), v.view.Down())
}

// noReplyWay returns why there is no route to a client.
func (v *Verifier) noReplyWay(client netip.Addr) string {
	if nic := v.Clients.nics[client.Is4()]; v.view.IsDown(nic) {
		return fmt.Sprintf(leadsDown, v.view.Name(uint32(nic)), "clients")
	}
	return fmt.Sprintf("replies are dropped: %s: the kernel has no route to clients (%s)%s",
		noRoute, client, v.view.Down())
}

// configuredHop reports whether the MAC address of a router towards a client is configured statically.
func (v *Verifier) configuredHop(client netip.Addr) bool {
	entries := route.Neighbours{}
	return slices.ContainsFunc(v.Routes.NextHops(client), func(x route.Router) bool {
		n, _ := entries.Of(x)
		return n.State&unix.NUD_PERMANENT != 0
	})
}
