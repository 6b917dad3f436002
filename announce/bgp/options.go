package bgp

import (
	"cmp"
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"time"

	"github.com/steelyard-lb/steelyard/lb"
)

// Options configures a Speaker. Fields without a default are required.
type Options struct {
	// ASN is the local autonomous system number. RouterID is the BGP identifier, an IPv4 address.
	ASN      uint32
	RouterID netip.Addr
	// Boundary wraps the handling of each peer message, BFD packet and router advertisement. It may be nil.
	Boundary *lb.Boundary `json:"-"`
	// ListenPort is the TCP port for connections from peers. 0 means 179. -1 means connect but do not listen.
	ListenPort int
	// ListenAddresses are the addresses to listen on. Empty means every address of the peers' families.
	ListenAddresses []netip.Addr
	Peers           []Peer
	// Communities are standard communities (RFC 1997) as numbers, including well-known ones.
	Communities []uint32
	// LargeCommunities are large communities (RFC 8092), ExtCommunities extended ones (RFC 4360): route targets and
	// route origins.
	LargeCommunities [][3]uint32
	ExtCommunities   [][8]byte
	// LocalPref is sent only to peers with the local ASN.
	LocalPref uint32
	// Pools have additional attributes for some VIPs. No VIP is in two pools.
	Pools []Pool
	// AggregateV4 and AggregateV6 are the lengths of the announced prefixes. 0 means 32 and 128. A prefix is announced
	// as long as any VIP in it is.
	AggregateV4, AggregateV6 int
	// Weighted selects the routes with a link bandwidth extended community proportional to the announcement's weight
	// (draft-ietf-idr-link-bandwidth).
	Weighted lb.Weighted
	// RestartTime is how long peers keep the routes while this process is down, in whole seconds up to 4095 s (RFC
	// 4724, section 3). 0 means 30 s.
	RestartTime time.Duration
	// LongLivedRestartTime is how much longer peers keep the routes, with the lowest preference, in whole seconds of 24
	// bits (RFC 9494). 0 turns this off.
	LongLivedRestartTime time.Duration
	// MaxRoutes is the maximum number of announced prefixes. Set reports an error for VIPs beyond it. 0 means no limit.
	MaxRoutes int
	// GracefulShutdown is how long routes have LowerPreference before a planned withdrawal (RFC 8326). 0 turns it off.
	GracefulShutdown time.Duration
	// NextHopV4 and NextHopV6 are this node's next hops if neither the session nor the interface towards the peer has
	// an address of the family. They may be zero.
	NextHopV4, NextHopV6 netip.Addr
	Log                  *slog.Logger
}

// Peer is one neighbour.
type Peer struct {
	// Address is the neighbour's address, with a zone if it is link-local. Exactly one of Address, Interface and
	// ListenRange is set.
	Address netip.Addr
	// Interface is a link where the neighbour is the only router. Its link-local address is found through router
	// advertisements. IPv4 routes have an IPv6 next hop if the neighbour supports this (RFC 8950).
	Interface string
	// ListenRange contains the addresses of neighbours that may connect to this node. Each is a peer while it is
	// connected.
	ListenRange netip.Prefix
	// ASN is the peer's AS number. With External it may be 0, which means any AS number except this node's.
	ASN      uint32
	External bool
	// LocalASN is this node's AS number as the peer sees it. 0 means Options.ASN.
	LocalASN uint32
	// Passive means that this node does not connect to the peer.
	Passive bool
	// Retry is the mean time between attempts to connect. 0 means 2 s.
	Retry time.Duration
	// Port is the peer's TCP port. 0 means 179.
	Port uint16
	// Password is the TCP MD5 key (RFC 2385), at most 80 bytes, or "" for none.
	Password string
	// HoldTime is proposed to the peer, in whole seconds from 3 s to 65535 s (RFC 4271, section 4.2). 0 means no
	// KEEPALIVEs, so a lost peer is detected only when sending to it fails.
	HoldTime time.Duration
	// Keepalive is the time between KEEPALIVEs. The maximum, a third of the negotiated hold time, is also the default.
	Keepalive time.Duration
	// MaxReceived is how many routes the peer may send; PeerStatus reports more. 0 means any number. All received
	// routes are discarded.
	MaxReceived uint32
	// Multihop is the maximum distance of an eBGP peer in hops, 1 to 255. 0 means directly connected. It does not apply
	// to iBGP peers.
	Multihop int
	// TTLSecurity accepts only packets that took at most Multihop hops (RFC 5082). Both sides must enable it.
	TTLSecurity bool
	// Source is the local address of the session. If it is zero, the kernel chooses.
	Source netip.Addr
	// Device is the interface or VRF to which the session is bound. Empty means any interface outside VRFs. It must be
	// empty for a peer with an Interface or a zone.
	Device string
	// BFD ends the session as soon as BFD reports a failure of the peer (RFC 5882).
	BFD BFD
	// GracefulRestart makes the peer keep the routes while this process is down (RFC 4724).
	GracefulRestart bool
	// Pools are the names of pools; the peer receives only their routes. Empty means all routes.
	Pools []string
	// Attributes apply to this peer and take precedence over pool attributes. Prepend is how many additional times ASN
	// appears in the AS path, for a peer in another AS.
	Attributes
	Prepend int
}

// Pool is a set of VIPs with additional attributes.
type Pool struct {
	Name   string
	Ranges []lb.AddrRange
	Attributes
	Prepend int // for peers without a Peer.Prepend of their own
	// AggregateV4 and AggregateV6 are the lengths of the announced prefixes, which are entirely in the pool. 0 means
	// Options' value.
	AggregateV4, AggregateV6 int
}

// Attributes are path attributes. Communities are added to those of Options.
type Attributes struct {
	Communities      []uint32
	LargeCommunities [][3]uint32
	ExtCommunities   [][8]byte
	LocalPref        *uint32 // nil for Options.LocalPref; only peers in the same AS receive it
	MED              *uint32 // nil for none
}

// Empty reports whether a has no attribute.
func (a Attributes) Empty() bool {
	return len(a.Communities)+len(a.LargeCommunities)+len(a.ExtCommunities) == 0 && a.LocalPref == nil && a.MED == nil
}

// BFD has the parameters for package bfd. The zero value disables BFD.
type BFD struct {
	Interval   time.Duration
	Multiplier uint8
	Multihop   bool
	MinTTL     uint8 // with Multihop, the lowest TTL accepted from the peer; 0 for any
}

const (
	defaultRestartTime = 30 * time.Second
	maxPassword        = 80 // TCP_MD5SIG_MAXKEYLEN
)

// withDefaults returns o with all defaults, or an error with every invalid field.
func (o Options) withDefaults() (Options, error) {
	var errs []error
	bad := func(format string, args ...any) { errs = append(errs, fmt.Errorf(format, args...)) }
	if o.Log == nil {
		bad("Log is required")
	}
	if o.ASN == 0 {
		bad("ASN is required")
	}
	if !o.RouterID.Is4() || o.RouterID.IsUnspecified() {
		bad("router id %v: want an IPv4 address", o.RouterID)
	}
	if o.ListenPort < -1 || o.ListenPort > 65535 {
		bad("listen port %d: want -1 to 65535", o.ListenPort)
	}
	if o.ListenPort == 0 {
		o.ListenPort = 179
	}
	orDefault(&o.AggregateV4, 32)
	orDefault(&o.AggregateV6, 128)
	orDefault(&o.RestartTime, defaultRestartTime)
	if o.AggregateV4 < 1 || o.AggregateV4 > 32 {
		bad("aggregate_v4 %d: want 1 to 32", o.AggregateV4)
	}
	if o.AggregateV6 < 1 || o.AggregateV6 > 128 {
		bad("aggregate_v6 %d: want 1 to 128", o.AggregateV6)
	}
	if o.RestartTime < time.Second || o.RestartTime > 4095*time.Second || o.RestartTime%time.Second != 0 {
		bad("restart time %v: want whole seconds, 1s to 4095s", o.RestartTime)
	}
	if l := o.LongLivedRestartTime; l < 0 || l > (1<<24-1)*time.Second || l%time.Second != 0 {
		bad("long-lived restart time %v: want whole seconds that fit in 24 bits", l)
	}
	if o.NextHopV4.IsValid() && !o.NextHopV4.Is4() {
		bad("IPv4 next hop %v: want an IPv4 address", o.NextHopV4)
	}
	if o.NextHopV6.IsValid() && (!o.NextHopV6.Is6() || o.NextHopV6.Is4In6() || o.NextHopV6.IsLinkLocalUnicast()) {
		bad("IPv6 next hop %v: want a global IPv6 address", o.NextHopV6)
	}
	peers := make([]Peer, len(o.Peers))
	seen := map[string]bool{}
	for i, p := range o.Peers {
		var err error
		if peers[i], err = p.withDefaults(); err != nil {
			errs = append(errs, err)
		}
		if seen[p.name()] {
			bad("peer %v is named twice", p.name())
		}
		seen[p.name()] = true
	}
	if len(peers) > maxPeers {
		bad("%d peers; at most %d are supported", len(peers), maxPeers)
	}
	o.Peers = peers
	return o, errors.Join(errs...)
}

func (p Peer) withDefaults() (Peer, error) {
	var errs []error
	bad := func(format string, args ...any) {
		errs = append(errs, fmt.Errorf("peer %v: %w", p.name(), fmt.Errorf(format, args...)))
	}
	orDefault(&p.Port, 179)
	switch {
	case p.Interface != "" || p.ListenRange.IsValid():
		if p.Address.IsValid() || p.Interface != "" && p.ListenRange.IsValid() {
			bad("want one of address, interface and range")
		}
		if r := p.ListenRange; r.IsValid() && (r != r.Masked() || r.Addr().Is4In6()) {
			bad("want a range without host bits")
		}
	case !p.Address.IsValid() || p.Address.IsUnspecified() || p.Address.IsMulticast() || p.Address.Is4In6():
		bad("want the address of a neighbour")
	}
	if p.Address.IsLinkLocalUnicast() && p.Address.Is6() && p.Address.Zone() == "" {
		bad("a link-local address needs its interface, as in %v%%eth0", p.Address)
	}
	if p.External != (p.ASN == 0) {
		bad("want either ASN or External")
	}
	if len(p.Password) > maxPassword {
		bad("password has %d bytes, the kernel accepts %d", len(p.Password), maxPassword)
	}
	if p.HoldTime != 0 && p.HoldTime < 3*time.Second || p.HoldTime > 65535*time.Second || p.HoldTime%time.Second != 0 {
		bad("hold time %v: want 0, or whole seconds, 3s to 65535s", p.HoldTime)
	}
	if p.Multihop < 0 || p.Multihop > 255 {
		bad("multihop %d: want 0 to 255", p.Multihop)
	}
	if p.Device != "" && (p.Interface != "" || p.Address.Zone() != "") {
		bad("Device cannot be combined with an interface or a zone")
	}
	if p.Source.IsValid() && p.Address.IsValid() && p.Source.Is4() != p.Address.Is4() {
		bad("source %v has the other address family", p.Source)
	}
	return p, errors.Join(errs...)
}

// localASN returns this node's AS number towards the peer.
func (p *Peer) localASN(o *Options) uint32 { return cmp.Or(p.LocalASN, o.ASN) }

// name identifies p in messages.
func (p *Peer) name() string {
	switch {
	case p.Interface != "":
		return p.Interface
	case p.ListenRange.IsValid():
		return p.ListenRange.String()
	}
	return p.Address.String()
}

func orDefault[T comparable](v *T, def T) {
	var zero T
	if *v == zero {
		*v = def
	}
}
