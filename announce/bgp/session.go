package bgp

import (
	"errors"
	"fmt"
	"net/netip"
	"os"
	"syscall"
	"time"

	api "github.com/osrg/gobgp/v3/api"
	"github.com/steelyard-lb/steelyard/lb"
)

// session is the state of one peer. The goroutine of Run writes it under Speaker.mu.
type session struct {
	peer     Peer
	state    string
	since    time.Time // of the last change to or from established
	nextHops nextHops
	// has4 and has6: the peer has negotiated the family.
	has4, has6 bool
	local      netip.Addr // local address of the session; zero: no session
	// addAt is when to add the peer to gobgp; zero: gobgp has it.
	addAt     time.Time
	readdedAt time.Time // when readdWaiting last removed and added the peer

	disconnectedAt time.Time // since when there is no TCP connection; zero: connected
	dialErr        error     // why the last attempt to connect failed
	fault          string    // why the last session ended or was refused
	faultAt        time.Time
	probedAt       time.Time // last NOTIFICATION probe
	reprobe        bool      // the cause in fault may be outdated: probe for it again
	md5Dropped     uint64    // md5Dropped() at disconnectedAt

	ups, downs uint64
	lastLogged string // state and reason last logged
}

// connecting reports whether gobgp has no session and no OPEN in progress with the peer.
func (n *session) connecting() bool { return n.state == "idle" || n.state == "active" }

// carries reports whether routes of the family of addr are sent to the peer.
func (n *session) carries(addr netip.Addr) bool {
	if addr.Is4() {
		return n.has4 && n.nextHops.has(addr)
	}
	return n.has6 && n.nextHops.has(addr)
}

// apiPeer returns the gobgp configuration of the peer.
//
// LocalRestarting sets Restart State and Forwarding State in the OPEN (RFC 4724, section 3). That is always correct:
// the datapath forwards while this process is down and while a session is lost. gobgp then defers routes until the
// peer has sent its End-of-RIB, which is not needed here: DeferralTime bounds it.
func (n *session) apiPeer(o *Options) *api.Peer {
	p := n.peer
	hold := uint64(p.HoldTime / time.Second)
	family := func(f *api.Family) *api.AfiSafi {
		return &api.AfiSafi{
			Config:            &api.AfiSafiConfig{Family: f, Enabled: true},
			MpGracefulRestart: &api.MpGracefulRestart{Config: &api.MpGracefulRestartConfig{Enabled: p.GracefulRestart}},
		}
	}
	out := &api.Peer{
		Conf:      &api.PeerConf{NeighborAddress: p.Address.String(), PeerAsn: p.ASN, AuthPassword: p.Password},
		Transport: &api.Transport{RemotePort: uint32(p.Port)},
		Timers: &api.Timers{Config: &api.TimersConfig{
			HoldTime: hold, KeepaliveInterval: max(hold/3, 1), ConnectRetry: connectRetry, IdleHoldTimeAfterReset: 1,
		}},
		AfiSafis: []*api.AfiSafi{family(familyV4), family(familyV6)},
	}
	if p.Source.IsValid() {
		out.Transport.LocalAddress = p.Source.String()
	}
	switch {
	case p.TTLSecurity:
		out.TtlSecurity = &api.TtlSecurity{Enabled: true, TtlMin: uint32(256 - max(p.Multihop, 1))}
	case p.Multihop > 0 && p.ASN != o.ASN:
		out.EbgpMultihop = &api.EbgpMultihop{Enabled: true, MultihopTtl: uint32(p.Multihop)}
	}
	if p.GracefulRestart {
		out.GracefulRestart = &api.GracefulRestart{
			Enabled: true, RestartTime: uint32(o.RestartTime / time.Second), DeferralTime: 1, LocalRestarting: true,
		}
	}
	return out
}

// status returns the public state. Speaker.mu is held.
func (n *session) status(now time.Time, v4, v6 int) lb.PeerStatus {
	s := lb.PeerStatus{Peer: n.peer.Address, ASN: n.peer.ASN, State: n.state, Since: n.since, LastError: n.reason(now)}
	s.Routes = n.routes(v4, v6)
	return s
}

// routes returns how many of v4 and v6 routes are sent to the peer.
func (n *session) routes(v4, v6 int) int {
	if n.state != stateEstablished {
		return 0
	}
	sent := 0
	if n.carries(netip.IPv4Unspecified()) {
		sent += v4
	}
	if n.carries(netip.IPv6Unspecified()) {
		sent += v6
	}
	return sent
}

// reason returns what is wrong and, where possible, what to check; "" when nothing is.
func (n *session) reason(now time.Time) string {
	if n.state == stateEstablished {
		return n.routesNotSent()
	}
	if n.dialErr == nil {
		return n.fault
	}
	at := netip.AddrPortFrom(n.peer.Address, n.peer.Port)
	duration := now.Sub(n.disconnectedAt).Round(time.Second)
	text := fmt.Sprintf("no TCP connection to %v for %v: %s", at, duration, n.dialProblem())
	if n.fault != "" {
		text += "; before that: " + n.fault
	}
	return text
}

// routesNotSent returns why an established session does not carry a family; "" when it carries both.
func (n *session) routesNotSent() string {
	switch {
	case n.has4 && n.nextHops.reason4 != "":
		return n.nextHops.reason4
	case n.has6 && n.nextHops.reason6 != "":
		return n.nextHops.reason6
	}
	return ""
}

// dialProblem returns why there is no TCP connection. The connecting side cannot distinguish a wrong password from a
// peer that is down: the kernel of the peer drops segments with a wrong signature silently (RFC 2385, section 2). But
// the peer connects too, and this kernel counts what it drops.
func (n *session) dialProblem() string {
	return dialProblem(n.dialErr, n.peer.Password != "", md5Dropped() > n.md5Dropped)
}

// dialProblem describes err; dropped: this kernel has dropped segments with a wrong signature since the connection was
// lost.
func dialProblem(err error, password, dropped bool) string {
	const text = "no response; this node has dropped TCP segments with "
	switch {
	case !isTimeout(err):
		return cause(err)
	case dropped && !password:
		return text + "an MD5 signature: the peer has a password, this node has none"
	case dropped:
		return text + "a wrong or missing MD5 signature: check the password (MD5) on both sides"
	default:
		return "no response; if the peer is up, check the password (MD5) on both sides"
	}
}

// logReason is reason without durations, for the log.
func (n *session) logReason() string {
	switch {
	case n.state == stateEstablished:
		return n.routesNotSent()
	case n.dialErr != nil:
		return "no TCP connection: " + n.dialProblem()
	default:
		return n.fault
	}
}

func isTimeout(err error) bool {
	return errors.Is(err, os.ErrDeadlineExceeded) || os.IsTimeout(err) || errors.Is(err, syscall.ETIMEDOUT)
}

// cause returns the innermost error: "connection refused" of "dial tcp 192.0.2.1:179: connect: connection refused".
func cause(err error) string {
	for {
		inner := errors.Unwrap(err)
		if inner == nil {
			return err.Error()
		}
		err = inner
	}
}
