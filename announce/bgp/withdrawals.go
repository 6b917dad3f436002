package bgp

import (
	"context"
	"net/netip"
	"slices"
	"sync"
	"time"

	"github.com/steelyard-lb/steelyard/announce/bgp/guard"
)

// withdrawalTracker tracks the routes written to each peer and the withdrawals not yet written. gobgp's DeletePath only
// queues withdrawals, but a VIP may be removed from the datapath only after they are written.
type withdrawalTracker struct {
	mu    sync.Mutex
	peers map[netip.Addr]*ribOut // peers with a session
	empty chan struct{}          // closed and replaced when nothing is pending
}

// ribOut is the Adj-RIB-Out of a session (RFC 4271, section 3.2), as written to the peer.
type ribOut struct {
	routes  map[netip.Prefix]*written
	pending map[netip.Prefix]struct{} // withdrawals not yet written
	carries func(netip.Prefix) bool   // whether the peer receives the route
}

// written is an UPDATE without its routes.
type written struct {
	attributes []byte
	nextHop    netip.Addr
	at         time.Time
}

func newWithdrawalTracker() *withdrawalTracker {
	return &withdrawalTracker{peers: map[netip.Addr]*ribOut{}, empty: make(chan struct{})}
}

// peerUp records a session with peer and which routes it carries. Call it before the first UPDATE.
func (w *withdrawalTracker) peerUp(peer netip.Addr, carries func(netip.Prefix) bool) {
	w.mu.Lock()
	defer w.mu.Unlock()
	r := w.peers[peer]
	if r == nil {
		r = &ribOut{routes: map[netip.Prefix]*written{}, pending: map[netip.Prefix]struct{}{}}
		w.peers[peer] = r
	}
	r.carries = carries
}

// peerDown records that the session with peer has ended. The peer then has no routes, or keeps them until the next
// session.
func (w *withdrawalTracker) peerDown(peer netip.Addr) {
	w.mu.Lock()
	defer w.mu.Unlock()
	delete(w.peers, peer)
	w.signal()
}

// expect records that prefixes are about to be withdrawn.
func (w *withdrawalTracker) expect(prefixes []netip.Prefix) {
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, r := range w.peers {
		for _, p := range prefixes {
			if r.carries(p) {
				r.pending[p] = struct{}{}
			}
		}
	}
}

// sent records an UPDATE written to peer. End-of-RIB follows the first routes of a session. A pending route that was
// not among them had been withdrawn before the session, so no withdrawal will follow; the peer removes it as stale (RFC
// 4724, section 4.2).
func (w *withdrawalTracker) sent(peer netip.Addr, u *guard.Update) {
	w.mu.Lock()
	defer w.mu.Unlock()
	r := w.peers[peer]
	if r == nil {
		return
	}
	for _, p := range u.Withdrawn {
		delete(r.routes, p)
		delete(r.pending, p)
	}
	if len(u.Announced) > 0 {
		with := &written{slices.Clone(u.Attributes), u.NextHop, time.Now()}
		for _, p := range u.Announced {
			r.routes[p] = with
		}
	}
	if u.EndOfRIB4 || u.EndOfRIB6 {
		for p := range r.pending {
			if _, has := r.routes[p]; !has && p.Addr().Is4() == u.EndOfRIB4 {
				delete(r.pending, p)
			}
		}
	}
	w.signal()
}

// routes returns how many routes the peer has.
func (w *withdrawalTracker) routes(peer netip.Addr) int {
	w.mu.Lock()
	defer w.mu.Unlock()
	if r := w.peers[peer]; r != nil {
		return len(r.routes)
	}
	return 0
}

// written reports whether a peer has the route.
func (w *withdrawalTracker) written(p netip.Prefix) bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, r := range w.peers {
		if _, ok := r.routes[p]; ok {
			return true
		}
	}
	return false
}

// signal wakes wait if nothing is pending. w.mu is held.
func (w *withdrawalTracker) signal() {
	if w.count() == 0 {
		close(w.empty)
		w.empty = make(chan struct{})
	}
}

// wait waits until nothing is pending or ctx ends. It returns the number of withdrawals still pending and stops
// tracking them.
func (w *withdrawalTracker) wait(ctx context.Context) int {
	w.mu.Lock()
	defer w.mu.Unlock()
	for ctx.Err() == nil {
		if w.count() == 0 {
			return 0
		}
		empty := w.empty
		w.mu.Unlock()
		select {
		case <-empty:
		case <-ctx.Done():
		}
		w.mu.Lock()
	}
	left := w.count()
	for _, r := range w.peers {
		clear(r.pending)
	}
	return left
}

func (w *withdrawalTracker) count() int {
	n := 0
	for _, r := range w.peers {
		n += len(r.pending)
	}
	return n
}
