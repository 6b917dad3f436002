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

// session is what the speaker knows of one peer. Written by the goroutine of Run under Speaker.mu.
type session struct {
	peer  Peer
	state string
	since time.Time // when it became established, or ceased to be
	hops  nextHops
	// has4 and has6: the peer takes routes of that family.
	has4, has6 bool
	local      netip.Addr // our address of the session; zero: there is none
	// addAt is when to give the peer to gobgp; zero: gobgp has it.
	addAt   time.Time
	renewed time.Time // when renewWaiting last did so

	noTCP      time.Time // since when there is no TCP connection; zero: there is one
	dial       error     // why the last attempt to connect failed
	fault      string    // what ended or refused the last session
	faultAt    time.Time
	asked      time.Time // when the peer was last asked why it refuses us
	md5Dropped uint64    // segments that this machine had dropped for their MD5 signature when noTCP began

	ups, downs uint64
	logged     string // the last reason that was logged
}

// carries reports whether routes of the family of addr go to the peer.
func (e *session) carries(addr netip.Addr) bool {
	if addr.Is4() {
		return e.has4 && e.hops.has(addr)
	}
	return e.has6 && e.hops.has(addr)
}

// apiPeer returns e as gobgp takes it.
//
// LocalRestarting makes the OPEN say that forwarding went on while we were away (RFC 4724, section 3: Restart State and
// Forwarding State). It is always true here: the datapath outlives this process, and every loss of a session too.
// gobgp then holds routes back until the peer has sent its End-of-RIB, which does not concern us: DeferralTime bounds it.
func (e *session) apiPeer(o *Options) *api.Peer {
	p := e.peer
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

// status returns e for people. It is called with Speaker.mu held.
func (e *session) status(now time.Time, v4, v6 int) lb.PeerStatus {
	s := lb.PeerStatus{Peer: e.peer.Address, ASN: e.peer.ASN, State: e.state, Since: e.since, LastError: e.reason(now)}
	s.Routes = e.routes(v4, v6)
	return s
}

// routes returns how many of v4 and v6 routes go to the peer.
func (e *session) routes(v4, v6 int) int {
	if e.state != stateEstablished {
		return 0
	}
	n := 0
	if e.carries(netip.IPv4Unspecified()) {
		n += v4
	}
	if e.carries(netip.IPv6Unspecified()) {
		n += v6
	}
	return n
}

// reason says what is wrong, and where it can be told what to do. "" when nothing is.
func (e *session) reason(now time.Time) string {
	if e.state == stateEstablished {
		return e.notSent()
	}
	if e.dial == nil {
		return e.fault
	}
	at := netip.AddrPortFrom(e.peer.Address, e.peer.Port)
	text := fmt.Sprintf("no TCP connection to %v for %v: %s", at, now.Sub(e.noTCP).Round(time.Second), e.noConnection())
	if e.fault != "" && now.Sub(e.faultAt) < time.Minute {
		text += "; before that: " + e.fault
	}
	return text
}

// notSent says which routes an established session does not carry.
func (e *session) notSent() string {
	switch {
	case e.has4 && e.hops.reason4 != "":
		return e.hops.reason4
	case e.has6 && e.hops.reason6 != "":
		return e.hops.reason6
	}
	return ""
}

// noConnection says why there is no TCP connection. A wrong password cannot be told from a silent peer on the dialling
// side: the kernel of the side that gets the wrong signature drops the segment and says nothing (RFC 2385, section 2).
// But the peer dials too, and what this kernel drops for that reason is counted.
func (e *session) noConnection() string {
	const dropped = "no answer; this machine has dropped TCP segments with "
	switch wrong := md5Dropped() > e.md5Dropped; {
	case !isTimeout(e.dial):
		return cause(e.dial)
	case wrong && e.peer.Password == "":
		return dropped + "an MD5 signature: the peer has a password, we have none"
	case wrong:
		return dropped + "a wrong or missing MD5 signature: check the password (MD5) on both sides"
	default:
		return "no answer; if the peer is up, check the password (MD5) on both sides"
	}
}

// problem is reason without what changes from one moment to the next, for the log.
func (e *session) problem() string {
	switch {
	case e.state == stateEstablished:
		return e.notSent()
	case e.dial != nil:
		return "no TCP connection: " + e.noConnection()
	default:
		return e.fault
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
