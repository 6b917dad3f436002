package lab

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"time"

	"github.com/vishvananda/netlink"
)

// End is one end of a Link, an interface of a host.
type End struct {
	Host *Host
	// Name is the interface name, at most 15 bytes.
	Name string
	// Addresses are the interface's addresses, with the link's prefix length.
	Addresses []netip.Prefix
	// Bridge is the host's bridge that has the interface as a port, or "".
	Bridge string
}

// LinkOptions apply to both ends of a Link. The zero value has an MTU of 1500 bytes and all offloads.
type LinkOptions struct {
	// MTU is in bytes; 0 means 1500.
	MTU int
	// SoftwareChecksums turns transmit checksum offload off and generic receive offload (GRO) on. A link needs both if
	// an XDP program transmits or redirects its frames: a veth pair leaves an offloaded checksum incomplete
	// (CHECKSUM_PARTIAL), and receives frames from XDP only with GRO, which turns on NAPI.
	SoftwareChecksums bool
}

// Link connects two hosts with a veth pair. Both ends are operational when it returns.
func (l *Lab) Link(a, b End, o LinkOptions) error {
	l.mu.Lock()
	l.links++
	// The ends of a veth pair in new namespaces often get the same index. The kernel then assumes that the link has no
	// lower device, and delays its link event by up to a second (net/core/link_watch.c, linkwatch_urgent_event). The
	// kernel itself assigns no indexes from 1000 on here.
	index := 1000 + l.links
	l.mu.Unlock()
	if err := link(a, b, index, o); err != nil {
		return fmt.Errorf("link %s:%s to %s:%s: %w", a.Host, a.Name, b.Host, b.Name, err)
	}
	return nil
}

func link(a, b End, index int, o LinkOptions) error {
	attrs := netlink.NewLinkAttrs()
	attrs.Name, attrs.Index = a.Name, index
	if attrs.MTU = o.MTU; attrs.MTU == 0 {
		attrs.MTU = 1500
	}
	veth := netlink.NewVeth(attrs)
	veth.PeerName, veth.PeerMTU = b.Name, uint32(attrs.MTU)
	veth.PeerNamespace = netlink.NsFd(b.Host.ns.net.Fd())
	if err := a.Host.nl.LinkAdd(veth); err != nil {
		return err
	}
	for _, e := range []End{a, b} {
		if err := e.configure(); err != nil {
			return fmt.Errorf("%s:%s: %w", e.Host, e.Name, err)
		}
	}
	// Set both ends up first. When GRO is turned on, veth enables NAPI, which XDP redirects need, only on an end that
	// is up.
	for _, e := range []End{a, b} {
		if o.SoftwareChecksums {
			if err := e.Host.SoftwareChecksums(e.Name); err != nil {
				return fmt.Errorf("%s:%s: %w", e.Host, e.Name, err)
			}
		}
	}
	_, err := Until(context.Background(), 3*time.Second, "the link is operational", func() error {
		return errors.Join(a.operational(), b.operational())
	})
	return err
}

func (e End) operational() error {
	dev, err := e.Host.nl.LinkByName(e.Name)
	if err == nil && dev.Attrs().OperState != netlink.OperUp {
		err = fmt.Errorf("%s:%s is %s", e.Host, e.Name, dev.Attrs().OperState)
	}
	return err
}

func (e End) configure() error {
	dev, err := e.Host.nl.LinkByName(e.Name)
	if err != nil {
		return err
	}
	if e.Bridge != "" {
		bridge, err := e.Host.nl.LinkByName(e.Bridge)
		if err != nil {
			return fmt.Errorf("bridge %s: %w", e.Bridge, err)
		}
		if err := e.Host.nl.LinkSetMaster(dev, bridge); err != nil {
			return fmt.Errorf("join bridge %s: %w", e.Bridge, err)
		}
	}
	if err := e.Host.nl.LinkSetUp(dev); err != nil {
		return err
	}
	for _, a := range e.Addresses {
		if err := e.Host.AddAddress(e.Name, a); err != nil {
			return err
		}
	}
	return nil
}
