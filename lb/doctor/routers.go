package doctor

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"net/netip"
	"os"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/mdlayher/packet"
	"golang.org/x/sys/unix"

	"github.com/steelyard-lb/steelyard/datapath/checksum"
	"github.com/steelyard-lb/steelyard/lb"
)

// settled is how long a router may take to use a route.
const settled = 5 * time.Second

// routers finds announced addresses for which a router has no route, because it filters or limits what it accepts. BGP
// does not tell. So the check sends the router an echo request to each address, as a client behind it would, and looks
// for the error "no route". Silence is no fault: routers may send no errors, and limit their rate.
func routers(ctx context.Context, n *Node) ([]lb.Finding, string) {
	var (
		faults []fault
		asked  int
		failed error
		asking sync.WaitGroup
		mu     sync.Mutex // guards faults, asked and failed
	)
	why := "there is no established session with a router of another AS on a link of this node"
	for _, p := range n.Peers {
		// A peer in the same AS may be a route reflector, which forwards nothing.
		if !p.established() || !p.External || p.Peer.Zone() != "" {
			continue
		}
		vips := n.sentTo(p)
		if len(vips) == 0 {
			why = fmt.Sprintf("%s has had none of this node's routes for %s yet", p.Peer, settled)
			continue
		}
		way, ok := pathTo(p.Peer)
		mac := macOf(way, p.Peer)
		if !ok || way.router.IsValid() || mac == nil {
			continue
		}
		asking.Go(func() {
			lacking, err := askRouter(ctx, way, mac, vips)
			mu.Lock()
			defer mu.Unlock()
			if err != nil {
				failed = err
				return
			}
			asked++
			for _, vip := range lacking {
				faults = append(faults, fault{vip.String(), fmt.Sprintf(
					"the router %s has received the route to %s, but answers that it has none", p.Peer, vip)})
			}
		})
	}
	asking.Wait()
	if asked == 0 && failed != nil {
		return nil, cannotAsk(failed)
	}
	slices.SortFunc(faults, func(a, b fault) int { return strings.Compare(a.text, b.text) })
	if asked == 0 {
		return nil, why
	}
	return merged(lb.FoundRouterLacksRoute, faults), ""
}

// sentTo returns the announced addresses of the peer's family that it should have a route to.
func (n *Node) sentTo(p Peer) (vips []netip.Addr) {
	for _, r := range n.Status.Routes {
		has := slices.ContainsFunc(p.Sent, func(s lb.SentRoute) bool {
			return s.Prefix.Contains(r.Address) && time.Since(s.At) > settled
		})
		if has && r.Announced && r.Address.Is4() == p.Peer.Is4() && len(vips) < targetsMax {
			vips = append(vips, r.Address)
		}
	}
	return vips
}

// askRouter returns the addresses for which a router answers that it has no route.
func askRouter(ctx context.Context, way path, mac net.HardwareAddr, vips []netip.Addr) ([]netip.Addr, error) {
	is4, protocol := vips[0].Is4(), unix.ETH_P_IP
	if !is4 {
		protocol = unix.ETH_P_IPV6
	}
	errs, err := openICMP(ctx, is4, netip.Addr{})
	if err != nil {
		return nil, err
	}
	defer errs.Close()
	out, err := packet.Listen(&way.nic, packet.Datagram, protocol, nil)
	if err != nil {
		return nil, fmt.Errorf("open a packet socket: %w", err)
	}
	defer out.Close()
	id := uint16(rand.Uint32())
	for seq, vip := range vips {
		request := echoPacket(way.source, vip, id, uint16(seq))
		if _, err := out.WriteTo(request, &packet.Addr{HardwareAddr: mac}); err != nil {
			return nil, fmt.Errorf("send to the router: %w", err)
		}
		if !pace(ctx, seq) {
			break
		}
	}
	errs.SetReadDeadline(soon(ctx, time.Second))
	var lacking []netip.Addr
	b := make([]byte, 64<<10)
	for {
		n, _, err := errs.ReadFrom(b)
		if errors.Is(err, os.ErrDeadlineExceeded) {
			slices.SortFunc(lacking, netip.Addr.Compare)
			return slices.Compact(lacking), nil
		}
		if a, ok := parseICMP(is4, b[:n]); err == nil && ok && a.noRoute && a.id == id && slices.Contains(vips, a.to) {
			lacking = append(lacking, a.to)
		}
	}
}

// echoPacket returns an IP packet with an echo request.
func echoPacket(from, to netip.Addr, id, seq uint16) []byte {
	const ttl = 64
	message := echoRequest(to, smallest, id, seq)
	if from.Is4() {
		h := make([]byte, ipv4Header)
		h[0], h[8], h[9] = 4<<4|ipv4Header/4, ttl, unix.IPPROTO_ICMP
		binary.BigEndian.PutUint16(h[2:], smallest)
		copy(h[12:], from.AsSlice())
		copy(h[16:], to.AsSlice())
		binary.BigEndian.PutUint16(h[10:], checksum.Internet(h))
		return append(h, message...)
	}
	h := make([]byte, ipv6Header)
	h[0], h[6], h[7] = 6<<4, unix.IPPROTO_ICMPV6, ttl
	binary.BigEndian.PutUint16(h[4:], uint16(len(message)))
	copy(h[8:], from.AsSlice())
	copy(h[24:], to.AsSlice())
	binary.BigEndian.PutUint16(message[2:], 0)
	sum := checksum.Internet(pseudo(from, to, len(message), unix.IPPROTO_ICMPV6), message)
	binary.BigEndian.PutUint16(message[2:], sum)
	return append(h, message...)
}

// pseudo returns the pseudo-header for the checksum of TCP and ICMPv6 (RFC 9293 §3.1, RFC 8200 §8.1).
func pseudo(from, to netip.Addr, length int, protocol byte) []byte {
	h := append(from.AsSlice(), to.AsSlice()...)
	if from.Is4() {
		return append(h, 0, protocol, byte(length>>8), byte(length))
	}
	return append(h, 0, 0, byte(length>>8), byte(length), 0, 0, 0, protocol)
}
