package proxy

import (
	"fmt"

	"github.com/google/nftables"
)

// Present returns which service proxy's rules are in this network namespace, or "" if there are none. It knows
// kube-proxy in its three modes, whose rules stay when it ends. It cannot see rules of iptables-legacy.
func Present() (string, error) {
	conn, err := nftables.New(nftables.AsLasting())
	if err != nil {
		return "", fmt.Errorf("look for another service proxy: %w", err)
	}
	defer conn.CloseLasting()
	for _, family := range []nftables.TableFamily{nftables.TableFamilyIPv4, nftables.TableFamilyIPv6} {
		chains, err := conn.ListChainsOfTableFamily(family)
		if err != nil {
			return "", fmt.Errorf("look for another service proxy: %w", err)
		}
		for _, c := range chains {
			switch {
			case c.Table.Name == "kube-proxy":
				return "kube-proxy in nftables mode", nil
			case c.Table.Name == "nat" && c.Name == "KUBE-SERVICES":
				return "kube-proxy in iptables or ipvs mode", nil
			}
		}
	}
	return "", nil
}
