package lab

import (
	"fmt"
	"net"
	"net/netip"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// Bridge adds a bridge to the host. End.Bridge makes interfaces its ports. Multicast snooping is off, so that neighbour
// discovery reaches every port from the start.
func (h *Host) Bridge(name string) error {
	attrs := netlink.NewLinkAttrs()
	attrs.Name = name
	off := false
	b := &netlink.Bridge{LinkAttrs: attrs, MulticastSnooping: &off}
	if err := h.nl.LinkAdd(b); err != nil {
		return fmt.Errorf("host %s: add bridge %s: %w", h, name, err)
	}
	return h.SetUp(name)
}

// AddAddress adds an address to an interface, without duplicate address detection.
func (h *Host) AddAddress(dev string, p netip.Prefix) error { return h.addr(dev, p, h.nl.AddrAdd) }

// DeleteAddress removes an address from an interface.
func (h *Host) DeleteAddress(dev string, p netip.Prefix) error { return h.addr(dev, p, h.nl.AddrDel) }

func (h *Host) addr(dev string, p netip.Prefix, change func(netlink.Link, *netlink.Addr) error) error {
	link, err := h.nl.LinkByName(dev)
	if err == nil {
		err = change(link, &netlink.Addr{IPNet: ipNet(p), Flags: nodad(p)})
	}
	if err != nil {
		return fmt.Errorf("host %s: address %s of %s: %w", h, p, dev, err)
	}
	return nil
}

// SetUp sets an interface up.
func (h *Host) SetUp(dev string) error { return h.setLink(dev, h.nl.LinkSetUp) }

// SetDown sets an interface down, so the other end of its link loses carrier.
func (h *Host) SetDown(dev string) error { return h.setLink(dev, h.nl.LinkSetDown) }

func (h *Host) setLink(dev string, change func(netlink.Link) error) error {
	link, err := h.nl.LinkByName(dev)
	if err == nil {
		err = change(link)
	}
	if err != nil {
		return fmt.Errorf("host %s: change link %s: %w", h, dev, err)
	}
	return nil
}

// Interfaces returns the names of the host's interfaces, except the loopback.
func (h *Host) Interfaces() ([]string, error) {
	links, err := h.nl.LinkList()
	if err != nil {
		return nil, fmt.Errorf("host %s: list links: %w", h, err)
	}
	var names []string
	for _, l := range links {
		if l.Attrs().Flags&net.FlagLoopback == 0 {
			names = append(names, l.Attrs().Name)
		}
	}
	return names, nil
}

func ipNet(p netip.Prefix) *net.IPNet {
	return &net.IPNet{IP: p.Addr().AsSlice(), Mask: net.CIDRMask(p.Bits(), p.Addr().BitLen())}
}

// nodad is the address flag that skips duplicate address detection (RFC 4862 §5.4), so that an IPv6 address is never
// tentative.
func nodad(p netip.Prefix) int {
	if p.Addr().Is4() {
		return 0
	}
	return unix.IFA_F_NODAD
}
