package bgp

import (
	"context"
	"net/netip"
	"sync"
	"time"

	"github.com/steelyard-lb/steelyard/announce/bfd"
)

// bfdRetry is the time between attempts to start BFD while another program uses its port.
const bfdRetry = 10 * time.Second

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

// startBFD runs the monitor once a peer has BFD, until stop is called. stop also tells the peers that the shutdown is
// planned. Call stop after the BGP sessions have ended, when routers no longer depend on BFD.
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

// setBFDError records why BFD does not run, and logs it once. BGP continues without BFD.
func (s *Speaker) setBFDError(err error) {
	if err == nil {
		return
	}
	s.mu.Lock()
	known := s.bfdError == err.Error()
	s.bfdError = err.Error()
	s.mu.Unlock()
	if !known {
		s.log.Error("BFD is not running", "err", err, "retry", bfdRetry)
	}
}

// bfdChanged is called by the monitor. Only a BFD session that was up can fail (RFC 5882, section 4.2): any host on the
// link can forge the single packet that starts a session with a neighbor that does not run BFD. A neighbor that
// administratively shuts BFD down has not failed (section 3.2).
func (s *Speaker) bfdChanged(before bfd.State, st bfd.Status) {
	if before == bfd.Up && st.RemoteDiag != bfd.DiagAdminDown {
		s.guard.Failed(st.Neighbor, st.BothUp, "bfd session down: "+st.Diag.String())
	}
}

type bfdState struct {
	text       string
	notUpSince time.Time // zero if BFD is up or not configured
}

// bfdWait is how long BFD may take to come up after the BGP session, because some routers start it only then.
const bfdWait = 10 * time.Second

// bfdNotice says why BFD is down although the BGP session is up, or returns "" if BFD is up or still has time to come
// up.
func (n *session) bfdNotice(b bfdState, now time.Time) string {
	if n.state != stateEstablished || now.Sub(n.since) < bfdWait ||
		b.notUpSince.IsZero() || now.Sub(b.notUpSince) < bfdWait {
		return ""
	}
	return "bfd is " + b.text
}

// bfdStates returns the BFD state of each peer. s.mu is held.
func (s *Speaker) bfdStates() map[netip.Addr]bfdState {
	states := map[netip.Addr]bfdState{}
	for _, st := range s.bfd.Sessions() {
		text := st.State.String()
		switch {
		case st.Problem != "":
			text += ": " + st.Problem
		case st.State == bfd.Up:
		case s.bfdError != "":
			text += ": " + s.bfdError
		case st.Discarded != "":
			text += ": packets from the peer are discarded: " + st.Discarded
		case st.RemoteDiag == bfd.DiagAdminDown:
			text += ": the peer has disabled it"
		case st.State == bfd.Init:
			text += ": the peer has received no packet from this node"
		case st.Diag != bfd.DiagNone && st.Diag != bfd.DiagTimeExpired:
			text += ": " + st.Diag.String()
		default:
			text += ": no packet from the peer arrives; check that BFD is enabled there, with the same multihop"
		}
		states[st.Neighbor] = bfdState{text, st.NotUpSince}
	}
	return states
}
