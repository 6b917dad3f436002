package lab

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/vishvananda/netlink"
)

// End is one end of a Link: an interface in a host.
type End struct {
	Host *Host
	// Name is the name of the interface, at most 15 bytes.
	Name string
	// Addresses are given to the interface, with the length of the prefix that is on the link.
	Addresses []netip.Prefix
	// Bridge is the bridge of the host that the interface becomes a port of; empty: none.
	Bridge string
}

// LinkOptions hold for both ends of a Link. The zero value is an Ethernet of 1500 bytes with all offloads.
type LinkOptions struct {
	// MTU in bytes; 0 means 1500.
	MTU int
	// SoftwareChecksums turns transmit checksum offload off and generic receive offload on, as a link needs whose
	// frames an XDP program transmits or redirects: on a veth pair, offload leaves the checksum for a card that is
	// not there, and a frame sent by XDP arrives only where GRO (so NAPI) is on.
	SoftwareChecksums bool
}

// Link joins two hosts by a wire. Both ends carry traffic when it returns.
func (l *Lab) Link(a, b End, o LinkOptions) error {
	l.mu.Lock()
	l.links++
	// The two ends of a veth pair in fresh namespaces easily have the same index, and then the kernel takes the link
	// for one that depends on no other and lets up to a second pass until it uses it (net/core/link_watch.c,
	// linkwatch_urgent_event). Indices from here on are never given out by itself.
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
	// Only once both are up: an end becomes a target of XDP redirects when the GRO of an end that is up is switched on.
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

// Bridge adds an Ethernet switch to the host: links join it by End.Bridge. It does not snoop multicast, so that
// neighbour discovery reaches every port at once.
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

// AddAddress gives an interface an address; it can be used at once.
func (h *Host) AddAddress(dev string, p netip.Prefix) error { return h.addr(dev, p, h.nl.AddrAdd) }

// DeleteAddress takes an address from an interface.
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

// SetUp puts an interface in service.
func (h *Host) SetUp(dev string) error { return h.setLink(dev, h.nl.LinkSetUp) }

// SetDown takes an interface out of service: the other end of its wire loses its carrier, as when a cable is pulled.
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

// Interfaces returns the names of the host's interfaces but the loopback.
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

// PowerOff is the mains plug pulled: every link goes down and every process of the host is killed, without a word to
// anyone, and what was in memory (/run, BPF pins) is lost. Servers made by this process are not told; they just hear
// and say nothing any more.
func (h *Host) PowerOff() error {
	names, err := h.Interfaces()
	if err != nil {
		return err
	}
	for _, n := range names {
		if err := h.SetDown(n); err != nil {
			return err
		}
	}
	for _, p := range h.running() {
		p.Kill()
	}
	return h.Do(func() error { return errors.Join(empty("/run"), empty("/sys/fs/bpf")) })
}

func empty(dir string) error {
	entries, err := os.ReadDir(dir)
	for _, e := range entries {
		if strings.HasSuffix(e.Name(), ".debug") {
			continue // a bpffs has maps.debug and progs.debug by itself, for good
		}
		err = errors.Join(err, os.RemoveAll(filepath.Join(dir, e.Name())))
	}
	return err
}

// PowerOn undoes what PowerOff did to the links, and puts back the routes. Processes stay dead.
func (h *Host) PowerOn() error {
	names, err := h.Interfaces()
	if err != nil {
		return err
	}
	for _, n := range names {
		if err := h.SetUp(n); err != nil {
			return err
		}
	}
	h.mu.Lock()
	routes := append([]netlink.Route(nil), h.routes...)
	h.mu.Unlock()
	for _, r := range routes {
		if err := h.nl.RouteReplace(&r); err != nil {
			return fmt.Errorf("host %s: put back route %s: %w", h, r, err)
		}
	}
	return nil
}

func ipNet(p netip.Prefix) *net.IPNet {
	return &net.IPNet{IP: p.Addr().AsSlice(), Mask: net.CIDRMask(p.Bits(), p.Addr().BitLen())}
}
