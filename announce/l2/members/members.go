package members

import (
	"context"
	"crypto/cipher"
	"encoding/binary"
	"encoding/json"
	"fmt"
	"io"
	"log"
	"log/slog"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/hashicorp/memberlist"

	"github.com/steelyard-lb/steelyard/lb"
	"github.com/steelyard-lb/steelyard/lb/printable"
)

// Options configures Members.
type Options struct {
	Name    string
	Address netip.Addr // identifies this node
	Port    uint16     // UDP and TCP, the same on all members
	// Boundary wraps the handling of each message. It may be nil.
	Boundary *lb.Boundary
	Log      *slog.Logger
}

const (
	probeInterval  = 200 * time.Millisecond
	probeTimeout   = 100 * time.Millisecond
	gossipInterval = 50 * time.Millisecond
	pushPull       = 10 * time.Second
	streamTimeout  = time.Second
	joinInterval   = time.Second
	joinAtOnce     = 8
	// joinWait is how long Joined waits for a first peer, because a site's nodes may start simultaneously.
	joinWait     = 2 * time.Second
	leaveTimeout = 500 * time.Millisecond
	// callInterval is how often a node sends messages to callAtOnce peers that do not respond.
	callInterval = 100 * time.Millisecond
	callAtOnce   = 64
	// heardFor is how long a message counts as a sign of life. It is shorter than the detection of a failure.
	heardFor = 300 * time.Millisecond
)

// queueMax limits the messages that wait to be sent, because false reports about this node make it send all its claims
// again. Members learn what is lost when they exchange their state.
const queueMax = 4096

// Members is this node's view of the other nodes.
type Members struct {
	o      Options
	table  *table
	queue  *memberlist.TransmitLimitedQueue
	keyed  chan struct{} // closed by the first SetKeys
	joined chan struct{} // see Joined

	mu      sync.Mutex // guards all below
	network *transport // nil until Run has created it
	list    *memberlist.Memberlist
	keys    []cipher.AEAD
	macs    []string
	known   bool // SetPeers was called
}

// New returns Members. They do nothing before Run, and neither send nor accept anything before SetKeys.
func New(o Options) *Members {
	m := &Members{o: o, keyed: make(chan struct{}), joined: make(chan struct{})}
	m.queue = &memberlist.TransmitLimitedQueue{
		RetransmitMult: 4, NumNodes: func() int { return 1 + int(m.table.alive.Load()) },
	}
	m.table = newTable(o.Address.Unmap(), o.Name, func(b []byte) {
		m.queue.QueueBroadcast(message(b))
		m.queue.Prune(queueMax)
	})
	return m
}

// Changed receives a value when a peer, its state or a claim may have changed.
func (m *Members) Changed() <-chan struct{} { return m.table.changed }

// Joined is closed when a first peer has answered, or none has for some time. An address claimed before that might soon
// move again.
func (m *Members) Joined() <-chan struct{} { return m.joined }

// SetPeers replaces the addresses of the other members. It ignores this node's own address.
func (m *Members) SetPeers(list []netip.Addr) {
	m.table.setPeers(list)
	m.mu.Lock()
	defer m.mu.Unlock()
	m.known = true
	m.filter()
}

// filter sets the network's filter. m.mu is held.
func (m *Members) filter() {
	if m.network == nil {
		return
	}
	if err := m.network.filter(m.table.addresses()); err != nil {
		m.o.Log.Warn("packets from unknown senders not filtered by the kernel", "err", err)
	}
}

// SetMACs sets the MAC addresses from which this node replies.
func (m *Members) SetMACs(macs []string) {
	m.mu.Lock()
	same := slices.Equal(m.macs, macs)
	m.macs = slices.Clone(macs)
	list := m.list
	m.mu.Unlock()
	if list != nil && !same {
		if err := list.UpdateNode(streamTimeout); err != nil {
			m.o.Log.Debug("MAC addresses not sent to members", "err", err)
		}
	}
}

// Publish replaces the claims of this node.
func (m *Members) Publish(claims map[netip.Addr]Claim) { m.table.publish(claims) }

// Peers returns the other members, by address, with their claims to vip.
func (m *Members) Peers(vip netip.Addr) []Peer { return m.table.list(vip) }

// Self returns the identity of this node.
func (m *Members) Self() netip.Addr { return m.table.self }

// OfMAC returns the member that has a MAC address. The member may be down.
func (m *Members) OfMAC(mac string) (Peer, bool) {
	if p, ok := m.table.ofMAC(mac); ok {
		return p, true
	}
	return Peer{}, false
}

// Run takes part in the group until ctx ends and then leaves it.
func (m *Members) Run(ctx context.Context) error {
	start := time.Now()
	select {
	case <-ctx.Done():
		return nil
	case <-m.keyed:
	case <-time.After(joinWait):
		m.o.Log.Warn("no key yet; waiting to join the members")
		m.ready()
		select {
		case <-ctx.Done():
			return nil
		case <-m.keyed:
		}
	}
	network, err := newTransport(m)
	if err != nil {
		m.ready()
		return fmt.Errorf("listen on %s port %d: %w", m.o.Address, m.o.Port, err)
	}
	m.mu.Lock()
	m.network = network
	m.filter()
	m.mu.Unlock()
	list, err := memberlist.Create(m.config(network))
	if err != nil {
		m.ready()
		return fmt.Errorf("join as %s: %w", m.o.Address, err)
	}
	m.mu.Lock()
	m.list = list
	m.mu.Unlock()
	defer func() {
		m.mu.Lock()
		m.list, m.network = nil, nil
		m.mu.Unlock()
		list.Leave(leaveTimeout)
		list.Shutdown()
	}()
	go network.call(ctx)
	m.o.Log.Info("membership started", "address", m.o.Address, "port", m.o.Port)
	for {
		answered := m.join(list)
		m.mu.Lock()
		known := m.known
		m.mu.Unlock()
		next := joinInterval
		if known && (answered || len(m.table.missing(false)) == 0) || time.Since(start) > joinWait {
			m.ready()
		} else {
			next /= 10
		}
		select {
		case <-ctx.Done():
			return nil
		case <-time.After(next):
		}
	}
}

func (m *Members) ready() {
	m.mu.Lock()
	defer m.mu.Unlock()
	select {
	case <-m.joined:
	default:
		close(m.joined)
	}
}

// join exchanges all claims with some of the missing peers. It reports whether any of them answered.
func (m *Members) join(list *memberlist.Memberlist) bool {
	missing := some(m.table.missing(false), joinAtOnce)
	answers := make(chan int, len(missing))
	for _, a := range missing {
		go func() {
			n, err := list.Join([]string{netip.AddrPortFrom(a, m.o.Port).String()})
			if err != nil {
				m.o.Log.Debug("member not reached", "member", a, "err", err)
			}
			answers <- n
		}()
	}
	sum := 0
	for range missing {
		sum += <-answers
	}
	return sum > 0
}

func (m *Members) config(network memberlist.Transport) *memberlist.Config {
	c := memberlist.DefaultLANConfig()
	c.Name, c.Transport = m.table.self.String(), network
	c.UDPBufferSize -= len(label) + sealed
	c.BindAddr, c.BindPort = m.table.self.String(), int(m.o.Port)
	c.AdvertiseAddr, c.AdvertisePort = c.BindAddr, c.BindPort
	c.ProbeInterval, c.ProbeTimeout, c.IndirectChecks = probeInterval, probeTimeout, 2
	c.SuspicionMult, c.SuspicionMaxTimeoutMult = 1, 1
	c.AwarenessMaxMultiplier = 1 // do not slow detection on a loaded machine
	c.GossipInterval, c.PushPullInterval, c.TCPTimeout = gossipInterval, pushPull, streamTimeout
	c.EnableCompression = false
	c.Delegate, c.Events, c.Alive, c.Conflict = delegate{m}, delegate{m}, delegate{m}, delegate{m}
	c.Ping = delegate{m}
	c.LogOutput, c.Logger = nil, log.New(debugLog{m.o.Log}, "", 0)
	return c
}

// meta is what memberlist tells others about a member. After a restart it arrives before the first report.
type meta struct {
	Name  string   `json:"n"`
	MACs  []string `json:"m"`
	Epoch uint64   `json:"e"` // epoch of the member's reports
}

// delegate implements the interfaces of memberlist, which holds a lock during calls.
type delegate struct{ *Members }

// NodeMeta implements memberlist.Delegate.
func (d delegate) NodeMeta(limit int) []byte {
	d.mu.Lock()
	x := meta{Name: d.o.Name, MACs: d.macs, Epoch: d.table.epoch()}
	d.mu.Unlock()
	for {
		b, err := json.Marshal(x)
		switch {
		case err == nil && len(b) <= limit:
			return b
		case len(x.MACs) == 0:
			return nil
		}
		x.MACs = x.MACs[:len(x.MACs)-1]
	}
}

// NotifyMsg implements memberlist.Delegate.
func (d delegate) NotifyMsg(b []byte) {
	d.o.Boundary.Do(lb.PartMember, "report", func() {
		if r, _, err := parseReport(b); err == nil {
			d.table.merge(r)
		}
	})
}

// GetBroadcasts implements memberlist.Delegate.
func (d delegate) GetBroadcasts(overhead, limit int) [][]byte {
	return d.queue.GetBroadcasts(overhead, limit)
}

// LocalState implements memberlist.Delegate.
func (d delegate) LocalState(bool) []byte { return d.table.whole() }

// MergeRemoteState implements memberlist.Delegate.
func (d delegate) MergeRemoteState(b []byte, _ bool) {
	d.o.Boundary.Do(lb.PartMember, "state", func() {
		for len(b) > 0 {
			r, rest, err := parseReport(b)
			if err != nil {
				d.o.Log.Debug("could not parse the state of a member", "err", err)
				return
			}
			d.table.merge(r)
			b = rest
		}
	})
}

// NotifyAlive implements memberlist.AliveDelegate: it accepts only configured peers, with our port and versions.
// memberlist would keep a wrong port that another member reports for half a minute after the peer contradicts it. While
// a member claims other versions, no two members would exchange their state.
func (d delegate) NotifyAlive(n *memberlist.Node) error {
	const version = memberlist.ProtocolVersion2Compatible
	a, ok := addressOf(n)
	ok = ok && n.Port == d.o.Port && n.PMin <= version && n.PCur == version && n.PMax >= version && n.DMin|n.DCur == 0
	if ok && (a == d.table.self || d.table.isPeer(a)) {
		return nil
	}
	return fmt.Errorf("%s is not a configured member", n.Name)
}

// NotifyJoin implements memberlist.EventDelegate.
func (d delegate) NotifyJoin(n *memberlist.Node) { d.changed(n, true) }

// NotifyUpdate implements memberlist.EventDelegate.
func (d delegate) NotifyUpdate(n *memberlist.Node) { d.changed(n, true) }

// NotifyLeave implements memberlist.EventDelegate.
func (d delegate) NotifyLeave(n *memberlist.Node) { d.changed(n, false) }

// NotifyConflict implements memberlist.ConflictDelegate. Names are addresses, so a conflict indicates a wrong address.
func (d delegate) NotifyConflict(_, other *memberlist.Node) {
	d.o.Log.Warn("two members have the same name", "name", other.Name, "address", other.Address())
}

// AckPayload implements memberlist.PingDelegate: it sends this node's clock. Earlier versions ignore it.
func (d delegate) AckPayload() []byte {
	return binary.BigEndian.AppendUint64(nil, uint64(time.Now().UnixNano()))
}

// NotifyPingComplete implements memberlist.PingDelegate. The member read its clock during the round trip. Earlier
// versions send none.
func (d delegate) NotifyPingComplete(n *memberlist.Node, trip time.Duration, payload []byte) {
	if a, ok := addressOf(n); ok && len(payload) == 8 {
		at := time.Unix(0, int64(binary.BigEndian.Uint64(payload)))
		d.table.setClock(a, at.Sub(time.Now().Add(-trip/2).Round(0)), trip)
	}
}

func (d delegate) changed(n *memberlist.Node, alive bool) {
	d.o.Boundary.Do(lb.PartMember, n.Name, func() { d.set(n, alive) })
}

func (d delegate) set(n *memberlist.Node, alive bool) {
	a, ok := addressOf(n)
	if !ok || a == d.table.self {
		return
	}
	var x meta
	if json.Unmarshal(n.Meta, &x) != nil || x.Name == "" {
		x.Name = n.Name
	}
	x.Name = printable.Cut(x.Name)
	if d.table.setAlive(a, alive, x) {
		d.o.Log.Info("member "+map[bool]string{true: "alive", false: "gone"}[alive], "member", x.Name, "address", a)
	}
}

// addressOf returns a member's address, or false if its name does not match.
func addressOf(n *memberlist.Node) (netip.Addr, bool) {
	a, ok := netip.AddrFromSlice(n.Addr)
	return a, ok && a.String() == n.Name
}

// message is a memberlist.Broadcast. It does not invalidate older messages, because reports are ordered.
type message []byte

func (message) Invalidates(memberlist.Broadcast) bool { return false }
func (m message) Message() []byte                     { return m }
func (message) Finished()                             {}

// UniqueBroadcast says that messages do not replace each other.
func (message) UniqueBroadcast() {}

// debugLog logs memberlist's lines at debug level. This package itself logs what matters.
type debugLog struct{ log *slog.Logger }

var _ io.Writer = debugLog{}

func (d debugLog) Write(b []byte) (int, error) {
	d.log.Debug("memberlist", "text", strings.TrimSpace(string(b)))
	return len(b), nil
}
