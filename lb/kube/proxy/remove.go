package proxy

import (
	"fmt"

	"github.com/google/nftables"
)

// Remove removes kube-proxy's rules in nftables mode from this network namespace, and returns the names of the tables.
// kube-proxy must not run. Rules in iptables mode are in tables of others as well, so Remove fails for them.
func Remove() (removed []string, err error) {
	conn, err := nftables.New()
	if err != nil {
		return nil, fmt.Errorf("remove the rules of kube-proxy: %w", err)
	}
	for _, family := range []nftables.TableFamily{nftables.TableFamilyIPv4, nftables.TableFamilyIPv6} {
		tables, err := conn.ListTablesOfFamily(family)
		if err != nil {
			return nil, fmt.Errorf("remove the rules of kube-proxy: %w", err)
		}
		for _, t := range tables {
			if t.Name != "kube-proxy" {
				continue
			}
			conn.DelTable(t)
			name := "ip"
			if family == nftables.TableFamilyIPv6 {
				name = "ip6"
			}
			removed = append(removed, fmt.Sprintf("nftables table %s %s", name, t.Name))
		}
	}
	if err := conn.Flush(); err != nil {
		return nil, fmt.Errorf("remove the rules of kube-proxy: %w", err)
	}
	other, err := Present()
	if err == nil && other != "" {
		err = fmt.Errorf("the rules of %s remain; remove them: kube-proxy --cleanup", other)
	}
	return removed, err
}
