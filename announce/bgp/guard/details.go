package guard

import (
	"net/netip"
	"time"
)

// Details describes what an established session has negotiated and exchanged.
type Details struct {
	Session
	RouterID            netip.Addr // the peer's BGP identifier
	LocalASN            uint32
	HoldTime, Keepalive time.Duration // 0 without KEEPALIVEs
	// RestartTime and LongLived are how long the peer keeps the routes after the session fails (RFC 4724, RFC 9494), or
	// 0 if it does not support graceful or long-lived graceful restart.
	RestartTime, LongLived time.Duration
	Routes                 Received
	Received, Sent         Messages
}

// Received counts the routes received in a session. All of them are discarded.
type Received struct {
	Announced uint64 // in all UPDATEs, including repetitions
	Withdrawn uint64
	Malformed uint64 // UPDATEs that could not be parsed
}

// Messages counts messages in one direction, including the OPEN.
type Messages struct {
	All, Updates uint64
	Last         time.Time
}

func (m *Messages) count(kind messageType) {
	m.All++
	if kind == typeUpdate {
		m.Updates++
	}
	m.Last = time.Now()
}

// Details returns the details of a peer's established session, or false if there is none.
func (g *Guard) Details(peer netip.Addr) (Details, bool) {
	g.mu.Lock()
	c := g.sessions[peer]
	g.mu.Unlock()
	if c == nil {
		return Details{}, false
	}
	d := Details{Session: c.described(), RouterID: c.theirs.ID, LocalASN: c.ours.ASN}
	d.HoldTime = holdTime(&c.ours, c.theirs)
	d.Keepalive = c.keepaliveInterval(d.HoldTime)
	if c.ours.GracefulRestart && c.theirs.GracefulRestart {
		d.RestartTime = time.Duration(c.ours.RestartTime) * time.Second
		if c.theirs.LongLivedAware {
			d.LongLived = time.Duration(c.ours.LongLived) * time.Second
		}
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	d.Routes, d.Received, d.Sent = c.routes, c.received, c.sent
	return d, true
}

// described returns the session for Options.Attach. Call it only after the handshake.
func (c *conn) described() Session {
	return Session{
		Peer: c.cfg.Address, Local: c.local, ASN: c.theirs.ASN, V4: c.theirs.V4, V6: c.theirs.V6,
		ExtendedNextHop: c.ours.ExtendedNextHop && c.theirs.ExtendedNextHop,
	}
}

// keepaliveInterval returns the time between KEEPALIVEs to the peer, or 0 if none are sent.
func (c *conn) keepaliveInterval(hold time.Duration) time.Duration {
	interval := hold / 3
	if c.cfg.Keepalive > 0 {
		interval = min(interval, c.cfg.Keepalive)
	}
	return interval
}
