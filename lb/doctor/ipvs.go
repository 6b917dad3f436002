package doctor

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"slices"
	"strings"

	"github.com/vishvananda/netlink"

	"github.com/steelyard-lb/steelyard/lb"
)

// strictARP finds addresses that the kernel itself answers ARP for, on every node, because kube-proxy in IPVS mode has
// put them on its device and its strictARP is off. With strictARP, kube-proxy sets arp_ignore and arp_announce.
func strictARP(_ context.Context, n *Node) ([]lb.Finding, string) {
	if n.AskOwn == nil {
		return nil, "no address is announced by ARP and NDP"
	}
	nic, err := netlink.LinkByName("kube-ipvs0")
	if errors.As(err, new(netlink.LinkNotFoundError)) {
		return nil, "kube-proxy is not in IPVS mode"
	}
	var addrs []netlink.Addr
	if err == nil {
		addrs, err = netlink.AddrList(nic, netlink.FAMILY_V4)
	}
	if err != nil {
		return nil, cannotAsk(err)
	}
	if !slices.ContainsFunc(n.Links, answersARP) {
		return nil, ""
	}
	var faults []fault
	for _, a := range addrs {
		if ip, _ := netip.AddrFromSlice(a.IP.To4()); n.isVIP(ip) {
			faults = append(faults, fault{ip.String(),
				fmt.Sprintf("the kernel answers ARP for %s, which kube-proxy has put on kube-ipvs0", ip)})
		}
	}
	return merged(lb.FoundStrictARP, faults), ""
}

// answersARP reports whether the kernel answers ARP requests that arrive on a link for addresses of others. The larger
// of two values applies (arp_ignore, Documentation/networking/ip-sysctl.rst).
func answersARP(link string) bool {
	for _, name := range []string{"all", link} {
		ignore, err := os.ReadFile("/proc/sys/net/ipv4/conf/" + name + "/arp_ignore")
		if err != nil || strings.TrimSpace(string(ignore)) != "0" {
			return false
		}
	}
	return true
}
