package route

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"time"

	"github.com/mdlayher/arp"
	"github.com/mdlayher/ethernet"
	"github.com/mdlayher/ndp"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/steelyard-lb/steelyard/datapath/internal/bpf"
)

// The kernel probes a known neighbour only every 15 to 45 seconds, and only while packets are sent to it. So the
// verification sends its own requests, and the kernel's processing of the answers confirms the entry. Setting the entry
// to NUD_PROBE instead would lose it after three unanswered requests, even if it belongs to a router that does not
// answer requests to its own MAC address.

// requester sends ARP and NDP requests. The zero value is ready to use.
type requester struct {
	socket int // AF_PACKET, or 0 if not open yet; kept open because closing it waits for an RCU grace period
	macs   map[int]net.HardwareAddr
	since  time.Time // Cache.Since when macs was emptied
}

// begin makes r reread the MAC addresses of interfaces if they may have changed, which changes the routes as well.
func (r *requester) begin(routes *Cache) {
	if r.macs == nil || r.since != routes.Since {
		r.macs, r.since = map[int]net.HardwareAddr{}, routes.Since
	}
}

func (r *requester) close() {
	if r.socket != 0 {
		unix.Close(r.socket)
		r.socket = 0
	}
}

// send asks a router for its MAC address. The request goes to the known address, or with all to every host.
func (r *requester) send(x Router, known net.HardwareAddr, all bool, routes *Cache) error {
	mac, err := r.mac(x.NIC)
	if err != nil {
		return err
	}
	source, err := routes.sourceTo(x)
	if err != nil {
		return err
	}
	to, proto := known, uint16(unix.ETH_P_ARP)
	var packet []byte
	if x.Addr.Is4() {
		if all {
			to = ethernet.Broadcast
		}
		packet, err = arpRequest(mac, source, x.Addr)
	} else {
		at := x.Addr
		if all {
			if at, err = ndp.SolicitedNodeMulticast(x.Addr); err != nil {
				return err
			}
			group := at.As16()
			to = net.HardwareAddr{0x33, 0x33, group[12], group[13], group[14], group[15]} // RFC 2464, 7
		}
		proto = unix.ETH_P_IPV6
		packet, err = solicitation(mac, source, at, x.Addr)
	}
	if err != nil {
		return fmt.Errorf("request to router %s: %w", x.Addr, err)
	}
	if len(to) != macLength {
		return errNoMAC
	}
	if r.socket == 0 {
		// With protocol 0 the socket receives no packets.
		s, err := unix.Socket(unix.AF_PACKET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, 0)
		if err != nil {
			return fmt.Errorf("ask routers: %w", err)
		}
		r.socket = s
	}
	link := &unix.SockaddrLinklayer{Protocol: bpf.Swap(proto), Ifindex: x.NIC, Halen: macLength}
	copy(link.Addr[:], to)
	if err := unix.Sendto(r.socket, packet, 0, link); err != nil {
		return fmt.Errorf("ask router %s: %w", x.Addr, err)
	}
	return nil
}

const macLength = 6

var errNoMAC = errors.New("no MAC address")

func (r *requester) mac(nic int) (net.HardwareAddr, error) {
	if mac, ok := r.macs[nic]; ok {
		return mac, nil
	}
	link, err := netlink.LinkByIndex(nic)
	if err != nil {
		return nil, fmt.Errorf("interface %d: %w", nic, err)
	}
	mac := link.Attrs().HardwareAddr
	if len(mac) != macLength {
		return nil, errNoMAC
	}
	r.macs[nic] = mac
	return mac, nil
}

// sourceTo returns our address towards a router.
func (k *Cache) sourceTo(x Router) (netip.Addr, error) {
	routes, err := k.Ask(Question{To: x.Addr, nic: x.NIC})
	if err != nil {
		return netip.Addr{}, fmt.Errorf("route to router %s: %w", x.Addr, err)
	}
	if len(routes) > 0 {
		if a, ok := netip.AddrFromSlice(routes[0].Src); ok {
			return a.Unmap(), nil
		}
	}
	return netip.Addr{}, fmt.Errorf("no address towards router %s", x.Addr)
}

// arpRequest returns an ARP request (RFC 826).
func arpRequest(mac net.HardwareAddr, source, target netip.Addr) ([]byte, error) {
	p, err := arp.NewPacket(arp.OperationRequest, mac, source, make(net.HardwareAddr, macLength), target)
	if err != nil {
		return nil, err
	}
	return p.MarshalBinary()
}

// solicitation returns a Neighbor Solicitation with its IPv6 header (RFC 4861, 4.3).
func solicitation(mac net.HardwareAddr, source, to, target netip.Addr) ([]byte, error) {
	m := &ndp.NeighborSolicitation{
		TargetAddress: target, Options: []ndp.Option{&ndp.LinkLayerAddress{Direction: ndp.Source, Addr: mac}},
	}
	message, err := ndp.MarshalMessageChecksum(m, source, to)
	if err != nil {
		return nil, err
	}
	header := []byte{0x60, 0, 0, 0, 0, byte(len(message)), unix.IPPROTO_ICMPV6, ndp.HopLimit}
	return slices.Concat(header, source.AsSlice(), to.AsSlice(), message), nil
}
