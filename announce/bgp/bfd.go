package bgp

import (
	"context"
	"net/netip"
	"sync"
	"time"

	"github.com/steelyard-lb/steelyard/announce/bfd"
)

// bfdRetry is the time until BFD is tried again after it could not start, because another program has its port.
const bfdRetry = 10 * time.Second

// neighbors returns the peers with BFD.
func (o *Options) neighbors() (list []bfd.Neighbor) {
	for _, p := range o.Peers {
		if p.BFD.Interval > 0 && p.known() {
			list = append(list, bfd.Neighbor{
				Addr: p.Address, Source: p.Source, Device: p.Device, Multihop: p.BFD.Multihop,
				MinTTL: p.BFD.MinTTL, Interval: p.BFD.Interval, Multiplier: p.BFD.Multiplier,
			})
		}
	}
	return list
}

// startBFD runs the monitor once a peer has BFD, until stop is called, which also tells the peers that the sessions end
// as planned. It is called after the sessions of BGP have ended: a router then has no reason left to wait for BFD.
func (s *Speaker) startBFD() (stop func()) {
	ctx, cancel := context.WithCancel(context.Background())
	var wg sync.WaitGroup
	wg.Go(func() {
		select {
		case <-ctx.Done():
			return
		case <-s.bfdWanted:
		}
		for ctx.Err() == nil {
			err := s.bfd.Run(ctx)
			s.setBFDError(err)
			select {
			case <-ctx.Done():
			case <-time.After(bfdRetry):
			}
		}
	})
	return func() {
		cancel()
		wg.Wait()
	}
}

// setBFDError records why BFD does not run, and logs it once. BGP goes on without it.
func (s *Speaker) setBFDError(err error) {
	if err == nil {
		return
	}
	s.mu.Lock()
	known := s.bfdError == err.Error()
	s.bfdError = err.Error()
	s.mu.Unlock()
	if !known {
		s.log.Error("bfd does not run", "err", err, "retry", bfdRetry)
	}
}

// bfdChanged is called by the monitor. A neighbor that ends BFD as planned has not failed (RFC 5882, section 3.2); of
// one that has, the session ends (section 4.3).
func (s *Speaker) bfdChanged(st bfd.Status) {
	if st.State == bfd.Down && st.RemoteDiag != bfd.DiagAdminDown {
		s.guard.Failed(st.Neighbor, "bfd session down: "+st.Diag.String())
	}
}

// bfdStates returns the states of BFD for PeerStatus. s.mu is held.
func (s *Speaker) bfdStates() map[netip.Addr]string {
	states := map[netip.Addr]string{}
	for _, st := range s.bfd.Sessions() {
		text := st.State.String()
		switch {
		case s.bfdError != "":
			text += ": " + s.bfdError
		case st.Problem != "":
			text += ": " + st.Problem
		case st.State != bfd.Up && st.Discarded != "":
			text += ": packets of the peer are discarded: " + st.Discarded
		case st.State != bfd.Up && st.RemoteDiag == bfd.DiagAdminDown:
			text += ": the peer has disabled it"
		case st.State != bfd.Up && st.Diag != bfd.DiagNone:
			text += ": " + st.Diag.String()
		}
		states[st.Neighbor] = text
	}
	return states
}
