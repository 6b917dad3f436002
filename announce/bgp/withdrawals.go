package bgp

import (
	"context"
	"net/netip"
	"sync"

	"github.com/osrg/gobgp/v3/pkg/log"
	"github.com/osrg/gobgp/v3/pkg/packet/bgp"
)

// withdrawalTracker tracks which withdrawals gobgp has not written to which peer yet. DeletePath returns when they are
// queued, but a VIP may be removed from the datapath only after they are written.
type withdrawalTracker struct {
	mu      sync.Mutex
	pending map[netip.Addr]map[netip.Prefix]struct{} // one entry per established session
	carries map[netip.Addr]func(netip.Addr) bool     // whether routes of that family are sent to the peer
	empty   chan struct{}                            // closed and replaced when nothing is pending
}

func newWithdrawalTracker() *withdrawalTracker {
	return &withdrawalTracker{
		pending: map[netip.Addr]map[netip.Prefix]struct{}{}, carries: map[netip.Addr]func(netip.Addr) bool{},
		empty: make(chan struct{}),
	}
}

// peerUp records an established session with peer, and which families it carries.
func (w *withdrawalTracker) peerUp(peer netip.Addr, carries func(netip.Addr) bool) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.carries[peer] = carries
	if w.pending[peer] == nil {
		w.pending[peer] = map[netip.Prefix]struct{}{}
	}
}

// peerDown records that there is no session with peer: it has no routes, or keeps them until the next session.
func (w *withdrawalTracker) peerDown(peer netip.Addr) {
	w.mu.Lock()
	defer w.mu.Unlock()
	delete(w.carries, peer)
	delete(w.pending, peer)
	w.signal()
}

// expect records that prefixes are about to be withdrawn from every peer with a session.
func (w *withdrawalTracker) expect(prefixes []netip.Prefix) {
	w.mu.Lock()
	defer w.mu.Unlock()
	for peer, pending := range w.pending {
		for _, p := range prefixes {
			if w.carries[peer](p.Addr()) {
				pending[p] = struct{}{}
			}
		}
	}
}

// updateSent records the withdrawals in an UPDATE written to peer. After an End-of-RIB the peer removes all stale
// routes (RFC 4724, section 2), so nothing is pending then.
func (w *withdrawalTracker) updateSent(peer netip.Addr, f log.Fields) {
	w.mu.Lock()
	defer w.mu.Unlock()
	pending := w.pending[peer]
	if len(pending) == 0 {
		return
	}
	withdrawn, _ := f["withdrawals"].([]*bgp.IPAddrPrefix)
	for _, n := range withdrawn {
		w.remove(pending, n)
	}
	announced, _ := f["nlri"].([]*bgp.IPAddrPrefix)
	attrs, _ := f["attributes"].([]bgp.PathAttributeInterface)
	endOfRIB := len(withdrawn) == 0 && len(announced) == 0 && len(attrs) == 0
	for _, a := range attrs {
		if mp, ok := a.(*bgp.PathAttributeMpUnreachNLRI); ok {
			endOfRIB = len(mp.Value) == 0
			for _, n := range mp.Value {
				w.remove(pending, n)
			}
		}
	}
	if endOfRIB {
		clear(pending)
	}
	w.signal()
}

func (w *withdrawalTracker) remove(pending map[netip.Prefix]struct{}, n bgp.AddrPrefixInterface) {
	if p, err := netip.ParsePrefix(n.String()); err == nil {
		delete(pending, p.Masked())
	}
}

// signal wakes wait when nothing is pending. w.mu is held.
func (w *withdrawalTracker) signal() {
	for _, p := range w.pending {
		if len(p) > 0 {
			return
		}
	}
	close(w.empty)
	w.empty = make(chan struct{})
}

// wait returns when nothing is pending or ctx ends. It returns the number of withdrawals still pending and stops
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
	for _, p := range w.pending {
		clear(p)
	}
	return left
}

func (w *withdrawalTracker) count() int {
	n := 0
	for _, p := range w.pending {
		n += len(p)
	}
	return n
}
