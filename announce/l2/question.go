package l2

import (
	"context"
	"encoding/binary"
	"math/rand/v2"
	"net"
	"net/netip"
	"time"

	"github.com/mdlayher/arp"
	"github.com/mdlayher/ndp"
)

const (
	questionInterval = time.Second            // minimum between questions about the same subject
	questionRepeats  = 3                      // several, because frames can be lost
	questionRepeat   = 100 * time.Millisecond // time between repeats
)

// question is a request with a random address. A frame's source MAC address proves nothing, because any host in the
// segment can forge it. Only a host that receives the question knows its random address.
type question struct {
	random netip.Addr
	at     time.Time
	to     net.HardwareAddr
	sent   int // times sent
}

// newQuestion returns a question to a host about an address of either family. No host has its random address: it is a
// reserved IPv4 address (RFC 1112, section 4) or a random link-local IPv6 address.
func newQuestion(is4 bool, to net.HardwareAddr, now time.Time) question {
	q := question{at: now, to: to}
	if is4 {
		var b [4]byte
		binary.BigEndian.PutUint32(b[:], 0xf0000000|rand.Uint32()>>5) // not 255.255.255.255
		q.random = netip.AddrFrom4(b)
		return q
	}
	b := [16]byte{0xfe, 0x80}
	binary.BigEndian.PutUint64(b[8:], rand.Uint64())
	q.random = netip.AddrFrom16(b)
	return q
}

// due reports whether another question may be asked.
func (q question) due(now time.Time) bool { return now.Sub(q.at) >= questionInterval }

// has reports whether a is the question's random address and the answer is in time.
func (q question) has(a netip.Addr, now time.Time) bool {
	return a.IsValid() && a == q.random && !q.due(now)
}

// next returns when to send the question again, or zero for never.
func (q question) next() time.Time {
	if !q.random.IsValid() || q.sent == questionRepeats {
		return time.Time{}
	}
	return q.at.Add(time.Duration(q.sent) * questionRepeat)
}

// ask asks a host whether it replies for vip. The reply goes to the random address.
func (r *responder) ask(ctx context.Context, vip netip.Addr, q question) {
	s := r.opened()
	if s == nil || r.isSilent() {
		return
	}
	r.a.pace.wait(ctx)
	var err error
	if vip.Is4() {
		var p *arp.Packet
		p, err = arp.NewPacket(arp.OperationRequest, s.ifi.HardwareAddr, q.random, make(net.HardwareAddr, 6), vip)
		if err == nil {
			err = s.arp.WriteTo(p, q.to)
		}
	} else if s.ndp != nil {
		source := &ndp.LinkLayerAddress{Direction: ndp.Source, Addr: s.ifi.HardwareAddr}
		m := &ndp.NeighborSolicitation{TargetAddress: vip, Options: []ndp.Option{source}}
		err = s.ndp.conn.send(m, q.random, vip, q.to)
	}
	if err != nil {
		r.log.Debug("request not sent", "vip", vip, "err", err)
	}
}
