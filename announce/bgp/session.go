package bgp

import (
	"cmp"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"slices"
	"syscall"
	"time"

	"github.com/steelyard-lb/steelyard/announce/bgp/guard"
	"github.com/steelyard-lb/steelyard/announce/loglimit"
	"github.com/steelyard-lb/steelyard/lb"
)

const stateEstablished = string(guard.Established)

// session is the state of one peer. Speaker.mu guards it.
type session struct {
	peer  Peer
	only  filter
	from  netip.Addr // address of the peer towards gobgp
	state string
	since time.Time // of the last change to or from established
	moved time.Time // of the last change of state

	// attach sets these fields; detach clears some of them.
	attached   bool // gobgp has the peer
	nextHops   nextHops
	has4, has6 bool       // both sides support the family
	extended   bool       // IPv4 routes may have an IPv6 next hop
	local      netip.Addr // local address of the session
	asn        uint32     // of the peer
	received   uint64     // routes from the peer, as of the last poll

	wants4, wants6 bool // there are routes of the family

	disconnectedAt time.Time // when the TCP connection was lost; zero if connected
	dialErr        error     // why the last attempt to connect failed
	fault          string    // why the last session ended or failed
	faultAt        time.Time
	vague          bool // fault names no cause
	probe          *signatureProbe
	signature      signature // of the peer's last SYN since the probe was opened

	errors     []lb.PeerError
	ups, downs uint64
	lastLogged string
	limit      loglimit.Limit
}

// carries reports whether the peer receives a route.
func (n *session) carries(p netip.Prefix) bool {
	has := n.has6
	if p.Addr().Is4() {
		has = n.has4
	}
	return has && n.nextHops.has(p.Addr()) && n.only.allows(p)
}

func newSession(p Peer, only filter, from netip.Addr) *session {
	now := time.Now()
	return &session{peer: p, only: only, from: from, state: string(guard.Idle), since: now, disconnectedAt: now}
}

// config returns the guard's configuration for the peer.
func (p *Peer) config(o *Options) guard.Config {
	c := guard.Config{
		Address: p.Address, Port: p.Port, ASN: p.ASN, Password: p.Password, HoldTime: p.HoldTime,
		TTL: p.ttl(p.localASN(o)), LocalASN: p.LocalASN, Keepalive: p.Keepalive, Retry: p.Retry,
		Source: p.Source, Device: p.Device, Routes: o.only(p).String(),
		ExtendedNextHop: p.Interface != "", Passive: p.passive(),
	}
	if p.LocalASN == o.ASN {
		c.LocalASN = 0 // no different from the default
	}
	if p.TTLSecurity {
		c.MinTTL = 256 - max(p.Multihop, 1)
	}
	if p.GracefulRestart {
		c.RestartTime, c.LongLived = o.RestartTime, o.LongLivedRestartTime
	}
	return c
}

// passive reports whether this node leaves connecting to the peer.
func (p *Peer) passive() bool { return p.Passive || p.ListenRange.IsValid() }

// ttl returns the TTL (IPv6: hop limit) of packets to p, or 0 for the kernel's default.
func (p *Peer) ttl(asn uint32) int {
	switch {
	case p.TTLSecurity:
		return 255
	case p.ASN == asn:
		return 0
	default:
		return max(p.Multihop, 1)
	}
}

// status returns the session's public state. routes is the number of routes written to the peer. Speaker.mu is held.
func (n *session) status(now time.Time, routes int) lb.PeerStatus {
	s := lb.PeerStatus{Peer: n.peer.Address, ASN: cmp.Or(n.peer.ASN, n.asn), State: n.state, Since: n.since}
	s.LastError = n.reason(now)
	s.Dynamic = n.peer.ListenRange.IsValid()
	s.Interface, s.Received, s.Errors = n.peer.Interface, n.received, slices.Clone(n.errors)
	s.Flaps = n.downs
	if n.state == stateEstablished {
		s.Routes = routes
	}
	return s
}

func (n *session) reason(now time.Time) string {
	if n.state == stateEstablished {
		return n.notice()
	}
	var problem string
	switch {
	case n.dialErr != nil:
		at := netip.AddrPortFrom(n.peer.Address, n.peer.Port)
		duration := now.Sub(n.disconnectedAt).Round(time.Second)
		problem = fmt.Sprintf("no TCP connection to %v for %v: %s", at, duration, n.dialProblem())
	case n.noOpen(now):
		problem = fmt.Sprintf("connected, but the peer has sent no OPEN for %v", now.Sub(n.moved).Round(time.Second))
	default:
		problem = n.signature.problem() // this node only waits for the peer
	}
	if problem == "" || n.fault == "" {
		return problem + n.fault
	}
	return problem + "; before that: " + n.fault
}

// openWait is how long the peer may take to send its OPEN before a missing OPEN is reported.
const openWait = 3 * time.Second

func (n *session) noOpen(now time.Time) bool {
	return n.state == string(guard.OpenSent) && now.Sub(n.moved) >= openWait
}

// notice says what is wrong with an established session, or returns "".
func (n *session) notice() string {
	switch {
	case n.has4 && n.wants4 && n.nextHops.reason4 != "":
		return n.nextHops.reason4
	case n.has6 && n.wants6 && n.nextHops.reason6 != "":
		return n.nextHops.reason6
	case n.peer.MaxReceived > 0 && n.received > uint64(n.peer.MaxReceived):
		const text = "the peer has announced more than max_received = %d routes in this session, " +
			"counting repetitions; they are discarded: do not export routes to this node"
		return fmt.Sprintf(text, n.peer.MaxReceived)
	}
	return ""
}

// dialProblem says why there is no TCP connection. The connecting side cannot tell a wrong password from a peer that is
// down, because the peer's kernel silently drops segments with a wrong signature (RFC 2385, section 2). But most peers
// also connect to us, and the signatures of their segments show which it is.
func (n *session) dialProblem() string { return dialProblem(n.dialErr, n.signature) }

func dialProblem(err error, s signature) string {
	switch {
	case !isTimeout(err):
		return cause(err)
	case s.problem() != "":
		return "no response; " + s.problem()
	case s == signatureRight:
		return "no response, but the peer connects with the right MD5 password; check the filters between the two"
	case s == signatureNone:
		return "no response, but the peer connects; check the filters between the two"
	default:
		return "no response; if the peer is up, check filters for that port, and the MD5 password on both sides"
	}
}

// problem says how the passwords differ, or returns "" if that is unknown.
func (s signature) problem() string {
	const text = "the peer sends TCP segments "
	switch s {
	case signatureSurplus:
		return text + "with an MD5 signature: it has a password, this node has none"
	case signatureMissing:
		return text + "without an MD5 signature: it has no MD5 password, this node has one"
	case signatureMismatch:
		return text + "with a wrong MD5 signature; check the MD5 password on both sides"
	}
	return ""
}

// logReason is reason without durations, for the log.
func (n *session) logReason(now time.Time) string {
	switch {
	case n.state == stateEstablished:
		return n.notice()
	case n.dialErr != nil:
		return "no TCP connection: " + n.dialProblem()
	case n.noOpen(now):
		return "connected, but the peer sends no OPEN"
	case n.signature.problem() != "":
		return n.signature.problem()
	default:
		return n.fault
	}
}

func isTimeout(err error) bool {
	return errors.Is(err, os.ErrDeadlineExceeded) || os.IsTimeout(err) || errors.Is(err, syscall.ETIMEDOUT)
}

// cause returns the text of the innermost error, such as "connection refused".
func cause(err error) string {
	for {
		inner := errors.Unwrap(err)
		if inner == nil {
			return err.Error()
		}
		err = inner
	}
}
