package bgp

import (
	"context"
	"net/netip"
	"sync"

	"github.com/osrg/gobgp/v3/pkg/log"
	"github.com/osrg/gobgp/v3/pkg/packet/bgp"
)

// wire knows which withdrawals gobgp has still to write to which peer: DeletePath returns when they are queued, but a
// VIP may leave the kernel only after they are gone.
type wire struct {
	mu      sync.Mutex
	pending map[netip.Addr]map[netip.Prefix]struct{} // an entry for every established session
	carries map[netip.Addr]func(netip.Addr) bool     // whether routes of that family go to the peer
	empty   chan struct{}                            // closed and replaced when nothing is pending any more
}

func newWire() *wire {
	return &wire{
		pending: map[netip.Addr]map[netip.Prefix]struct{}{}, carries: map[netip.Addr]func(netip.Addr) bool{},
		empty: make(chan struct{}),
	}
}

// up says that the session with peer is established and which families of routes go to it.
func (w *wire) up(peer netip.Addr, carries func(netip.Addr) bool) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.carries[peer] = carries
	if w.pending[peer] == nil {
		w.pending[peer] = map[netip.Prefix]struct{}{}
	}
}

// down says that there is no session with peer: it has nothing of ours, or keeps it whatever we do.
func (w *wire) down(peer netip.Addr) {
	w.mu.Lock()
	defer w.mu.Unlock()
	delete(w.carries, peer)
	delete(w.pending, peer)
	w.check()
}

// expect says that these prefixes are about to be withdrawn from every peer that has a session.
func (w *wire) expect(prefixes []netip.Prefix) {
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

// sent takes what an UPDATE to peer withdrew. An End-of-RIB says that the peer has been told everything, and forgets
// what it has not been told (RFC 4724, section 2).
func (w *wire) sent(peer netip.Addr, f log.Fields) {
	w.mu.Lock()
	defer w.mu.Unlock()
	pending := w.pending[peer]
	if len(pending) == 0 {
		return
	}
	withdrawn, _ := f["withdrawals"].([]*bgp.IPAddrPrefix)
	for _, n := range withdrawn {
		w.withdrawn(pending, n)
	}
	announced, _ := f["nlri"].([]*bgp.IPAddrPrefix)
	attrs, _ := f["attributes"].([]bgp.PathAttributeInterface)
	endOfRIB := len(withdrawn) == 0 && len(announced) == 0 && len(attrs) == 0
	for _, a := range attrs {
		if mp, ok := a.(*bgp.PathAttributeMpUnreachNLRI); ok {
			endOfRIB = len(mp.Value) == 0
			for _, n := range mp.Value {
				w.withdrawn(pending, n)
			}
		}
	}
	if endOfRIB {
		clear(pending)
	}
	w.check()
}

func (w *wire) withdrawn(pending map[netip.Prefix]struct{}, n bgp.AddrPrefixInterface) {
	if p, err := netip.ParsePrefix(n.String()); err == nil {
		delete(pending, p.Masked())
	}
}

// check wakes who waits when nothing is pending. w.mu is held.
func (w *wire) check() {
	for _, p := range w.pending {
		if len(p) > 0 {
			return
		}
	}
	close(w.empty)
	w.empty = make(chan struct{})
}

// wait returns when nothing is pending or ctx ends; what is pending then is given up. It reports how many withdrawals
// that were.
func (w *wire) wait(ctx context.Context) int {
	w.mu.Lock()
	defer w.mu.Unlock()
	for ctx.Err() == nil {
		if w.left() == 0 {
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
	left := w.left()
	for _, p := range w.pending {
		clear(p)
	}
	return left
}

func (w *wire) left() int {
	n := 0
	for _, p := range w.pending {
		n += len(p)
	}
	return n
}
