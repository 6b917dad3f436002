package members

import (
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"sync"
	"sync/atomic"
	"time"
)

// Claim is what a member says about a VIP. The zero Claim is that of a member that has nothing to do with it.
type Claim struct {
	Eligible bool // it can serve the VIP
	Holds    bool // it answers for the VIP
	Local    bool // it has endpoints of the VIP itself
	// Term grows with each take-over. Of two that hold a VIP, the one with the higher term took over last.
	Term uint32
}

// Peer is another member, and its claim to a VIP.
type Peer struct {
	Address netip.Addr
	Name    string
	Twin    bool // another member says that it has the same name
	Alive   bool
	Since   time.Time // when it became alive or not alive
	Known   bool      // it has said which VIPs it can serve
	Claim   Claim
}

// claimsMax bounds what is accepted from the network.
const claimsMax = 1 << 16 // of a member

// table is what the members say. It is safe for concurrent use.
type table struct {
	self    netip.Addr
	name    string        // of this node
	changed chan struct{} // capacity 1
	send    func([]byte)  // a message to all members
	alive   atomic.Int32  // number of peers

	mu    sync.Mutex // guards all below
	own   state
	said  bool                 // publish was called
	peers map[netip.Addr]*peer // the configured ones
}

// state is the claims of a member.
type state struct {
	epoch  uint64 // of the process; a later one replaces all claims
	seq    uint64 // of the last change
	claims map[netip.Addr]entry
}

// entry is a claim with its order among the changes of the member.
type entry struct {
	Claim
	seq uint64
}

type peer struct {
	state
	name string // with the address if another member has the same
	said string // its name
	twin bool
	macs []string
	// started is the epoch of its process; claims of an earlier one do not count.
	started uint64
	alive   bool
	since   time.Time
}

func newTable(self netip.Addr, name string, send func([]byte)) *table {
	return &table{
		self: self, name: name, changed: make(chan struct{}, 1), send: send, peers: map[netip.Addr]*peer{},
		own: state{epoch: uint64(time.Now().UnixNano()), claims: map[netip.Addr]entry{}},
	}
}

// signal tells the user of the table that something may have changed.
func (t *table) signal() {
	select {
	case t.changed <- struct{}{}:
	default:
	}
}

// setPeers replaces the configured peers, of which only those of the own address family can be reached. What the
// remaining ones said is kept.
func (t *table) setPeers(list []netip.Addr) {
	t.mu.Lock()
	defer t.mu.Unlock()
	next := map[netip.Addr]*peer{}
	for _, a := range list {
		if a = a.Unmap(); a == t.self || a.Is4() != t.self.Is4() {
			continue
		}
		if next[a] = t.peers[a]; next[a] == nil {
			next[a] = &peer{said: a.String(), state: state{claims: map[netip.Addr]entry{}}, since: time.Now()}
		}
	}
	t.peers = next
	t.nameAll()
	t.count()
	t.signal()
}

// nameAll makes names of the peers that differ; t.mu is held.
func (t *table) nameAll() {
	n := map[string]int{t.name: 1}
	for _, p := range t.peers {
		n[p.said]++
	}
	for a, p := range t.peers {
		if p.name, p.twin = p.said, n[p.said] > 1; p.twin {
			p.name = fmt.Sprintf("%s (%s)", p.said, a)
		}
	}
}

// count counts the peers that are alive; t.mu is held.
func (t *table) count() {
	n := int32(0)
	for _, p := range t.peers {
		if p.alive {
			n++
		}
	}
	t.alive.Store(n)
}

// epoch returns that of this process.
func (t *table) epoch() uint64 {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.own.epoch
}

func (t *table) isPeer(a netip.Addr) bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.peers[a] != nil
}

// addresses returns those of the configured peers.
func (t *table) addresses() []netip.Addr {
	t.mu.Lock()
	defer t.mu.Unlock()
	return slices.Collect(maps.Keys(t.peers))
}

// missing returns the configured peers that are not alive.
func (t *table) missing() (list []netip.Addr) {
	t.mu.Lock()
	defer t.mu.Unlock()
	for a, p := range t.peers {
		if !p.alive {
			list = append(list, a)
		}
	}
	return list
}

// setAlive records that a peer is alive or not. It returns whether that is news.
func (t *table) setAlive(a netip.Addr, alive bool, m meta) bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	p := t.peers[a]
	if p == nil {
		return false
	}
	if alive {
		p.said, p.macs, p.started = m.Name, m.MACs, m.Epoch
		t.nameAll()
	}
	news := p.alive != alive
	if news {
		p.alive, p.since = alive, time.Now()
		t.count()
	}
	t.signal()
	return news
}

// list returns the peers, by address. claim is theirs to vip.
func (t *table) list(vip netip.Addr) []Peer {
	t.mu.Lock()
	defer t.mu.Unlock()
	list := make([]Peer, 0, len(t.peers))
	for a, p := range t.peers {
		x := Peer{Address: a, Name: p.name, Twin: p.twin, Alive: p.alive, Since: p.since}
		if x.Known = p.epoch != 0 && p.epoch >= p.started; x.Known {
			x.Claim = p.claims[vip].Claim
		}
		list = append(list, x)
	}
	slices.SortFunc(list, func(x, y Peer) int { return x.Address.Compare(y.Address) })
	return list
}

// ofMAC returns the peer that has a MAC address.
func (t *table) ofMAC(mac string) (Peer, bool) {
	t.mu.Lock()
	defer t.mu.Unlock()
	for a, p := range t.peers {
		if slices.Contains(p.macs, mac) {
			return Peer{Address: a, Name: p.name, Alive: p.alive, Since: p.since}, true
		}
	}
	return Peer{}, false
}

// publish replaces the own claims, and sends the changes.
func (t *table) publish(claims map[netip.Addr]Claim) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if !t.said {
		t.said = true
		t.send(report{member: t.self, epoch: t.own.epoch}.append(nil))
	}
	changed := map[netip.Addr]entry{}
	for vip := range t.own.claims {
		if _, ok := claims[vip]; !ok {
			t.own.seq++
			changed[vip] = entry{seq: t.own.seq}
			delete(t.own.claims, vip)
		}
	}
	for vip, c := range claims {
		if was, ok := t.own.claims[vip]; ok && was.Claim == c {
			continue
		}
		t.own.seq++
		changed[vip] = entry{c, t.own.seq}
		t.own.claims[vip] = changed[vip]
	}
	t.sendChanges(changed)
}

// sendChanges sends changes of the own claims; t.mu is held.
func (t *table) sendChanges(changed map[netip.Addr]entry) {
	for part := range slices.Chunk(slices.Collect(maps.Keys(changed)), changesMax) {
		d := report{member: t.self, epoch: t.own.epoch, claims: map[netip.Addr]entry{}}
		for _, vip := range part {
			d.claims[vip] = changed[vip]
		}
		t.send(d.append(nil))
	}
}

// merge takes a report of a member, which may be late or a copy.
func (t *table) merge(r report) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if r.member == t.self {
		// The clock was ahead in an earlier run, or another member has lied: others would ignore what this one says.
		if r.epoch > t.own.epoch || r.epoch == t.own.epoch && r.isAfter(t.own.seq) {
			t.own.epoch = r.epoch + 1
			t.sendChanges(t.own.claims)
		}
		return
	}
	p := t.peers[r.member]
	if p == nil || r.epoch < p.epoch {
		return
	}
	if r.epoch > p.epoch {
		p.state = state{epoch: r.epoch, claims: map[netip.Addr]entry{}}
		t.signal()
	}
	news := false
	for vip, e := range r.claims {
		was, known := p.claims[vip]
		if e.seq > was.seq && (known || len(p.claims) < claimsMax) {
			p.claims[vip] = e
			news = news || was.Claim != e.Claim
		}
	}
	if r.whole {
		for vip, e := range p.claims {
			if _, ok := r.claims[vip]; !ok && e.seq <= r.seq {
				delete(p.claims, vip)
				news = news || e.Claim != Claim{}
			}
		}
	}
	if news {
		t.signal()
	}
}

// size returns about how many bytes whole returns.
func (t *table) size() int {
	t.mu.Lock()
	defer t.mu.Unlock()
	size := headerSize + claimSize*len(t.own.claims)
	for _, p := range t.peers {
		size += headerSize + claimSize*len(p.claims)
	}
	return size
}

// whole returns what this node knows of all members, its own claims first.
func (t *table) whole() []byte {
	t.mu.Lock()
	defer t.mu.Unlock()
	var b []byte
	if t.said {
		b = report{t.self, t.own.epoch, t.own.seq, true, t.own.claims}.append(b)
	}
	for a, p := range t.peers {
		if p.epoch == 0 {
			continue
		}
		// The seq of what was heard may be less than the member's own: its claims are no complete list then.
		b = report{a, p.epoch, 0, false, p.claims}.append(b)
	}
	return b
}
