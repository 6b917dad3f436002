package l2

import (
	"bytes"
	"net"
	"net/netip"
	"slices"
	"time"
)

// If several interfaces are in one segment, only the first one in the list replies there, because hosts would otherwise
// flip between MAC addresses.

// heardOwn handles a frame with the MAC address of another interface of this node, and its target address. The other
// interface then probes for a random address. Any interface that receives this probe is in the same segment.
func (r *responder) heardOwn(mac net.HardwareAddr, target netip.Addr) {
	if r.isSilent() {
		return
	}
	for _, other := range r.a.responders {
		if other == r {
			return
		}
		s := other.opened()
		if s == nil || !bytes.Equal(s.ifi.HardwareAddr, mac) || other.isSilent() {
			continue
		}
		if other.proves(s, target, time.Now()) {
			r.mu.Lock()
			r.replies = other.name
			r.mu.Unlock()
			r.log.Warn("interface does not reply because another interface of [l2] is in the same segment",
				"other", other.name)
		}
		return
	}
}

// proves reports whether a received target address is the last probe's. Otherwise it sends the next probe if one is
// due.
func (r *responder) proves(s *sockets, target netip.Addr, now time.Time) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.segment.has(target, now) {
		return true
	}
	if r.segment.due(now) {
		r.segment = newQuestion(true, nil, now)
		if err := probeARP(s, r.segment.random); err != nil {
			r.log.Debug("probe not sent", "err", err)
		}
	}
	return false
}

// isSilent reports whether another interface replies in the same segment.
func (r *responder) isSilent() bool {
	r.mu.Lock()
	name := r.replies
	r.mu.Unlock()
	return name != "" && slices.ContainsFunc(r.a.responders, func(other *responder) bool {
		return other.name == name && other.isOpen()
	})
}
