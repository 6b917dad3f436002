package l2

import (
	"fmt"
	"math/rand/v2"
	"net"
	"net/netip"
	"slices"
	"strings"
	"time"

	"github.com/mdlayher/arp"
	"github.com/mdlayher/ndp"
	"github.com/vishvananda/netlink"
)

// A node that receives nothing, because its receive queue hangs or the link works in one direction only, hears neither
// other members nor replies to its probes. It would take all VIPs from healthy owners. So if no other member is alive,
// a node takes over a VIP only after hearing another host since its first probe. It queries its neighbours to make them
// reply.
//
// If the other direction fails, this node hears members that receive neither its messages nor its probes. It takes no
// VIP from them.

// askedMax limits how many neighbours are queried at a time.
const askedMax = 8

type knownHost struct {
	ip  netip.Addr
	mac net.HardwareAddr
}

// hear records a frame from another host.
func (r *responder) hear() { r.heard.Store(time.Now().UnixNano()) }

// deaf says why this node must not take over a VIP that it has probed since that time: the owner is heard, or no member
// is alive and no other host was heard. It returns "" if the takeover is allowed. a.mu is held.
func (a *Announcer) deaf(vip netip.Addr, since time.Time) string {
	if a.o.Members == nil {
		return ""
	}
	peers := a.o.Members.Peers(vip)
	alive := false
	for _, p := range peers {
		if p.Heard && p.Claim.Holds && p.Claim.Eligible {
			return fmt.Sprintf("not taken over: %s has it; it is heard, but does not respond", p.Name)
		}
		alive = alive || p.Alive
	}
	if alive {
		return ""
	}
	var names []string
	for _, r := range a.responders {
		if r.isOpen() && r.heard.Load() >= since.UnixNano() {
			return ""
		}
		names = append(names, r.name)
	}
	if len(peers) == 0 {
		return ""
	}
	return fmt.Sprintf("not taken over: no other member responds, and no other host is heard on %s",
		strings.Join(names, ", "))
}

// askNeighbours makes up to askedMax known hosts on the link reply.
func (r *responder) askNeighbours() {
	s := r.opened()
	if s == nil {
		return
	}
	list := r.sys.neighbours(s.ifi.Index)
	rand.Shuffle(len(list), func(i, k int) { list[i], list[k] = list[k], list[i] })
	for _, n := range list[:min(len(list), askedMax)] {
		var err error
		if n.ip.Is4() {
			var p *arp.Packet
			none := make(net.HardwareAddr, 6)
			p, err = arp.NewPacket(arp.OperationRequest, s.ifi.HardwareAddr, netip.IPv4Unspecified(), none, n.ip)
			if err == nil {
				err = s.arp.WriteTo(p, n.mac)
			}
		} else if s.ndp != nil && s.ndp.source.IsValid() {
			source := &ndp.LinkLayerAddress{Direction: ndp.Source, Addr: s.ifi.HardwareAddr}
			m := &ndp.NeighborSolicitation{TargetAddress: n.ip, Options: []ndp.Option{source}}
			err = s.ndp.conn.send(m, s.ndp.source, n.ip, n.mac)
		}
		if err != nil {
			r.log.Debug("request to neighbour not sent", "neighbour", n.ip, "err", err)
		}
	}
}

func neighboursOf(index int) (list []knownHost) {
	all, err := netlink.NeighList(index, netlink.FAMILY_ALL)
	if err != nil {
		return nil
	}
	const without = netlink.NUD_FAILED | netlink.NUD_INCOMPLETE | netlink.NUD_NOARP
	for _, n := range all {
		ip, _ := netip.AddrFromSlice(n.IP)
		if n.State&without == 0 && len(n.HardwareAddr) == 6 && n.HardwareAddr[0]&1 == 0 && !ip.IsMulticast() {
			list = append(list, knownHost{ip.Unmap(), slices.Clone(n.HardwareAddr)})
		}
	}
	return list
}
