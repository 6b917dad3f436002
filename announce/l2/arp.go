package l2

import (
	"bytes"
	"errors"
	"net"
	"net/netip"

	"github.com/mdlayher/arp"
	"github.com/mdlayher/ethernet"
)

// readARP answers requests until the socket is closed.
func (p *port) readARP(s *sockets) error {
	for {
		packet, _, err := s.arp.Read()
		if err != nil {
			if errors.Is(err, net.ErrClosed) {
				return nil
			}
			var op *net.OpError
			if errors.As(err, &op) {
				return err // the interface is gone or down
			}
			continue // a frame that lies about its lengths
		}
		if bytes.Equal(packet.SenderHardwareAddr, s.ifi.HardwareAddr) {
			continue
		}
		if packet.SenderIP.IsValid() && !packet.SenderIP.IsUnspecified() {
			p.a.rival(packet.SenderIP, packet.SenderHardwareAddr.String(), p.name)
		}
		if packet.Operation != arp.OperationRequest {
			continue
		}
		sent, err := p.a.answer(packet.TargetIP, func() error {
			return s.arp.Reply(packet, s.ifi.HardwareAddr, packet.TargetIP)
		})
		if err != nil {
			p.log.Debug("not answered", "vip", packet.TargetIP, "err", err)
		} else if sent {
			p.a.metrics.answers.WithLabelValues(p.name).Inc()
		}
	}
}

// gratuitousARP announces vip as a request and as a reply: some stacks heed only the one, some only the other
// (RFC 5227 §3 describes why it is a request).
func gratuitousARP(s *sockets, vip netip.Addr) error {
	request, err := arp.NewPacket(arp.OperationRequest, s.ifi.HardwareAddr, vip, make(net.HardwareAddr, 6), vip)
	if err != nil {
		return err
	}
	reply, err := arp.NewPacket(arp.OperationReply, s.ifi.HardwareAddr, vip, ethernet.Broadcast, vip)
	if err != nil {
		return err
	}
	return errors.Join(s.arp.WriteTo(request, ethernet.Broadcast), s.arp.WriteTo(reply, ethernet.Broadcast))
}
