package l2

import (
	"bytes"
	"errors"
	"net"
	"net/netip"

	"github.com/mdlayher/arp"
	"github.com/mdlayher/ethernet"

	"github.com/steelyard-lb/steelyard/lb"
)

func (r *responder) readARP(s *sockets) error {
	for {
		var packet *arp.Packet
		var err error
		if !r.a.o.Boundary.Do(lb.PartFrame, r.name, func() { packet, err = s.arp.Read() }) {
			continue
		}
		if err != nil {
			if errors.Is(err, net.ErrClosed) {
				return nil
			}
			var op *net.OpError
			if errors.As(err, &op) {
				return err // the interface is down or was deleted
			}
			continue // a frame with wrong lengths
		}
		r.a.o.Boundary.Do(lb.PartFrame, r.name, func() { r.heardARP(s, packet) })
	}
}

func (r *responder) heardARP(s *sockets, packet *arp.Packet) {
	if bytes.Equal(packet.SenderHardwareAddr, s.ifi.HardwareAddr) {
		return
	}
	if !r.a.isOwn(packet.SenderHardwareAddr.String()) {
		r.hear()
	}
	r.heardOwn(packet.SenderHardwareAddr, packet.TargetIP)
	// A probe has the sender address 0.0.0.0, so it claims nothing.
	r.a.conflict(packet.SenderIP, packet.SenderHardwareAddr.String(), r.name, packet.TargetIP)
	if packet.Operation != arp.OperationRequest {
		return
	}
	if packet.SenderIP.IsUnspecified() {
		r.a.probed(packet.TargetIP, s.ifi.HardwareAddr, packet.SenderHardwareAddr, r.name)
	}
	if r.isSilent() {
		return
	}
	reply := r.a.reply
	if packet.SenderIP.IsUnspecified() {
		reply = r.a.claimOwned
	}
	sent, err := reply(packet.TargetIP, func() error {
		return replyARP(s, packet)
	})
	if err != nil {
		r.log.Debug("reply not sent", "vip", packet.TargetIP, "err", err)
	} else if sent {
		r.a.metrics.replies.WithLabelValues(r.name).Inc()
	}
}

func replyARP(s *sockets, request *arp.Packet) error {
	to := request.SenderHardwareAddr
	p, err := arp.NewPacket(arp.OperationReply, s.ifi.HardwareAddr, request.TargetIP, to, request.SenderIP)
	if err != nil {
		return err
	}
	return s.arp.WriteTo(p, to)
}

// gratuitousARP announces vip with a request (RFC 5227 §3) and a reply, because some stacks process only one of the
// two.
func gratuitousARP(s *sockets, vip netip.Addr) error {
	request, err := arp.NewPacket(arp.OperationRequest, s.ifi.HardwareAddr, vip, make(net.HardwareAddr, 6), vip)
	if err != nil {
		return err
	}
	reply := *request
	reply.Operation, reply.TargetHardwareAddr = arp.OperationReply, ethernet.Broadcast
	return errors.Join(s.arp.WriteTo(request, ethernet.Broadcast), s.arp.WriteTo(&reply, ethernet.Broadcast))
}
