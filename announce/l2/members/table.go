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

// Claim is what a member reports about a VIP. The zero Claim means that the member neither has nor can serve the VIP.
type Claim struct {
	Eligible bool // can serve the VIP
	Holds    bool // replies for the VIP
	Local    bool // has local endpoints of the VIP
	// Term grows with each takeover. If two members have a VIP, the one with the higher term took over last.
	Term uint32
}

// Peer is another member with its claim to a VIP.
type Peer struct {
	Address netip.Addr
	Name    string
	Twin    bool // another member has the same name
	Alive   bool
	Heard   bool      // sends messages although it is not alive: it may not receive this node's messages
	Since   time.Time // when Alive last changed
	Known   bool      // has reported which VIPs it can serve
	// Ahead is how far its clock is ahead of this node's, or negative, with a possible error of Within. Within is 0
	// if the clock is not known.
	Ahead, Within time.Duration
	Claim         Claim
}

// claimsMax limits the claims accepted from the network.
const claimsMax = 1 << 16 // per member

// table contains what the members report. It is safe for concurrent use.
type table struct {
	self    netip.Addr
	name    string        // of this node
	changed chan struct{} // capacity 1
	send    func([]byte)  // sends a message to all members
	alive   atomic.Int32  // number of live peers

	mu    sync.Mutex // guards all below
	own   state
	said  bool
	peers map[netip.Addr]*peer // the configured peers
}

// state contains a member's claims.
type state struct {
	epoch  uint64 // of the process; a later one replaces all claims
	seq    uint64 // of the last change
	claims map[netip.Addr]entry
}

// entry is a claim with its position among the member's changes.
type entry struct {
	Claim
	seq uint64
}

type peer struct {
	state
	name string // includes the address if another member has the same name
	said string // name from its meta
	twin bool
	macs []string
	// started is the epoch of the member's process. Claims with an older epoch do not count.
	started uint64
	alive   bool
	since   time.Time
	heard   time.Time // last message from its address

	ahead, within time.Duration // as in Peer
}

func newTable(self netip.Addr, name string, send func([]byte)) *table {
	return &table{
		self: self, name: name, changed: make(chan struct{}, 1), send: send, peers: map[netip.Addr]*peer{},
		own: state{epoch: uint64(time.Now().UnixNano()), claims: map[netip.Addr]entry{}},
	}
}

// signal tells the table's user about possible changes.
func (t *table) signal() {
	select {
	case t.changed <- struct{}{}:
	default:
	}
}

// setPeers replaces the configured peers. Only peers of this node's address family can be reached. Remaining peers keep
// their state.
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

func (t *table) count() {
	n := int32(0)
	for _, p := range t.peers {
		if p.alive {
			n++
		}
	}
	t.alive.Store(n)
}

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

func (t *table) addresses() []netip.Addr {
	t.mu.Lock()
	defer t.mu.Unlock()
	return slices.Collect(maps.Keys(t.peers))
}

// missing returns the configured peers that are not alive; with known, only those that have reported something.
func (t *table) missing(known bool) (list []netip.Addr) {
	t.mu.Lock()
	defer t.mu.Unlock()
	for a, p := range t.peers {
		if !p.alive && (!known || p.epoch != 0) {
			list = append(list, a)
		}
	}
	return list
}

// hear records a message from a peer's address.
func (t *table) hear(a netip.Addr) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if p := t.peers[a]; p != nil {
		p.heard = time.Now()
	}
}

// setAlive records whether a peer is alive. It reports whether this changed.
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

// list returns the peers by address, with their claims to vip.
func (t *table) list(vip netip.Addr) []Peer {
	t.mu.Lock()
	defer t.mu.Unlock()
	list := make([]Peer, 0, len(t.peers))
	for a, p := range t.peers {
		x := Peer{Address: a, Name: p.name, Twin: p.twin, Alive: p.alive, Since: p.since}
		x.Ahead, x.Within = p.ahead, p.within
		x.Heard = !p.alive && time.Since(p.heard) < heardFor
		if x.Known = p.epoch != 0 && p.epoch >= p.started; x.Known {
			x.Claim = p.claims[vip].Claim
		}
		list = append(list, x)
	}
	slices.SortFunc(list, func(x, y Peer) int { return x.Address.Compare(y.Address) })
	return list
}

// setClock stores how far a member's clock is ahead. The round trip bounds the error.
func (t *table) setClock(member netip.Addr, ahead, trip time.Duration) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if p := t.peers[member]; p != nil {
		p.ahead, p.within = ahead, max(trip, 1)
	}
}

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

// publish replaces this node's claims and sends the changes.
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

// sendChanges sends changes of this node's claims. t.mu is held.
func (t *table) sendChanges(changed map[netip.Addr]entry) {
	for part := range slices.Chunk(slices.Collect(maps.Keys(changed)), changesMax) {
		d := report{member: t.self, epoch: t.own.epoch, claims: map[netip.Addr]entry{}}
		for _, vip := range part {
			d.claims[vip] = changed[vip]
		}
		t.send(d.append(nil))
	}
}

// merge applies a report about a member. Reports may be late or duplicates.
func (t *table) merge(r report) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if r.member == t.self {
		// The clock was ahead in a previous run, or a member has lied. The others would ignore claims with a lower
		// epoch.
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

// size returns the approximate number of bytes that whole returns.
func (t *table) size() int {
	t.mu.Lock()
	defer t.mu.Unlock()
	size := headerSize + claimSize*len(t.own.claims)
	for _, p := range t.peers {
		size += headerSize + claimSize*len(p.claims)
	}
	return size
}

// whole returns all claims that this node knows, its own first.
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
		claims := p.claims
		if len(b)+claimSize*len(claims) > streamMax/2 {
			claims = nil // the epoch alone tells the member of false reports in its name
		}
		// The member may have had later changes, so these claims may be incomplete.
		b = report{a, p.epoch, 0, false, claims}.append(b)
	}
	return b
}
