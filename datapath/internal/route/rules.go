package route

import (
	"errors"
	"fmt"
	"net/netip"
	"slices"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// SourceRules returns the source prefixes of this node's routing rules (ip-rule(8)), without duplicates.
func SourceRules() (all []netip.Prefix, err error) {
	for _, family := range []int{netlink.FAMILY_V4, netlink.FAMILY_V6} {
		rules, err := netlink.RuleList(family)
		if errors.Is(err, unix.EAFNOSUPPORT) || errors.Is(err, unix.EOPNOTSUPP) { // this kernel has no such rules
			continue
		}
		if err != nil {
			return nil, fmt.Errorf("read the routing rules: %w", err)
		}
		for _, r := range rules {
			if r.Src == nil {
				continue
			}
			bits, _ := r.Src.Mask.Size()
			if a, ok := netip.AddrFromSlice(r.Src.IP); ok {
				all = append(all, netip.PrefixFrom(a.Unmap(), bits))
			}
		}
	}
	slices.SortFunc(all, netip.Prefix.Compare)
	return slices.Compact(all), nil
}
