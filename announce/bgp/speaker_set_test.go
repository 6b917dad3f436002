package bgp

import (
	"context"
	"fmt"
	"net/netip"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/steelyard-lb/steelyard/announce/bgp/guard"
	"github.com/steelyard-lb/steelyard/lb"
	"github.com/steelyard-lb/steelyard/lb/lbtest/must"
)

// withServer returns a speaker with a gobgp that has no peer and does not listen.
func withServer(t *testing.T, log *strings.Builder) (*Speaker, *session, *bgpServer) {
	t.Helper()
	s, p := newTestSpeaker(t, log)
	srv := must.Get(s.startServer(t.Context(), false))(t)
	s.server = srv
	return s, p, srv
}

// Set waits for withdrawals until they are written to every session, and 2 s at most: then it logs how many are left.
func TestSetWaitsForWithdrawals(t *testing.T) {
	written := &guard.Update{Withdrawn: []netip.Prefix{netip.MustParsePrefix("203.0.113.1/32")}}
	for _, row := range []struct {
		name    string
		set     []lb.Announcement
		written bool // after 1 s
		took    time.Duration
		log     string
	}{
		{"no withdrawal", announce("203.0.113.1", 1, "203.0.113.2", 1), false, 0, ""},
		{"written", announce("203.0.113.2", 1), true, time.Second, ""},
		{"not written", announce("203.0.113.2", 1), false, 2 * time.Second,
			`level=WARN msg="withdrawals not confirmed" routes=1 after=2s`},
		{"one of two written", nil, true, 2 * time.Second, "routes=1 after=2s"},
	} {
		synctest.Test(t, func(t *testing.T) {
			var out strings.Builder
			s, p, srv := withServer(t, &out)
			defer srv.stop()
			must.Do(t, s.Set(t.Context(), announce("203.0.113.1", 1, "203.0.113.2", 1)))
			peer := p.peer.Address
			s.withdrawals.peerUp(peer, isIPv4)
			if row.written {
				time.AfterFunc(time.Second, func() { s.withdrawals.sent(peer, written) })
			}
			out.Reset()
			began := time.Now()
			err := s.Set(t.Context(), row.set)
			if took := time.Since(began); err != nil || took != row.took {
				t.Errorf("%s: Set took %s, want %s; error %v", row.name, took, row.took, err)
			}
			if got := out.String(); (row.log == "") != (got == "") || !strings.Contains(got, row.log) {
				t.Errorf("%s: logged %q, want %q", row.name, got, row.log)
			}
			if len(s.installed) != len(row.set) {
				t.Errorf("%s: %d installed routes", row.name, len(s.installed))
			}
		})
	}
}

// endsAfter is a context whose Err is nil for the first n calls.
type endsAfter struct {
	context.Context
	n *int
}

func (c endsAfter) Err() error {
	if *c.n--; *c.n >= 0 {
		return nil
	}
	return context.Canceled
}

// Set stops when its context ends, and reports how many routes it has not changed. It looks after every 256 routes.
func TestSetStopsWhenItsContextEnds(t *testing.T) {
	all := make([]lb.Announcement, 600)
	for i := range all {
		all[i] = lb.Announcement{VIP: netip.AddrFrom4([4]byte{203, 0, byte(i >> 8), byte(i)}), Weight: 1}
	}
	for checks, want := range map[int]string{
		0: "change routes: 600 of 600 not changed: context canceled",
		1: "change routes: 344 of 600 not changed: context canceled",
		2: "change routes: 88 of 600 not changed: context canceled",
		3: "",
	} {
		var out strings.Builder
		s, _, srv := withServer(t, &out)
		err := s.Set(endsAfter{t.Context(), &checks}, all)
		if got := errText(err); got != want {
			t.Errorf("error %q, want %q", got, want)
		}
		var left int
		if _, scanErr := fmt.Sscanf(errText(err), "change routes: %d", &left); scanErr != nil {
			left = 0
		}
		if len(s.installed) != 600-left {
			t.Errorf("%d routes installed, want %d", len(s.installed), 600-left)
		}
		if err := s.Set(t.Context(), all); err != nil || len(s.installed) != 600 {
			t.Errorf("the next Set: %d routes installed, error %v", len(s.installed), err)
		}
		srv.stop()
	}
}

// post never blocks and keeps the wake-up until it is received, and take returns each event once.
func TestMailbox(t *testing.T) {
	s, _ := newTestSpeaker(t, new(strings.Builder))
	for _, state := range []guard.State{"a", "b"} {
		s.mail.post(guard.Event{New: state})
	}
	if n := len(s.mail.wake); n != 1 {
		t.Errorf("%d wake-ups, want 1", n)
	}
	if got := s.mail.take(); len(got) != 2 || got[0].New != "a" || got[1].New != "b" {
		t.Errorf("events %+v", got)
	}
	if got := s.mail.take(); len(got) != 0 {
		t.Errorf("the same events again: %+v", got)
	}
}

func TestPeersAreSorted(t *testing.T) {
	o := validOptions()
	for _, a := range []string{"192.0.2.3", "2001:db8::1", "192.0.2.1", "192.0.2.2"} {
		o.Peers = append(o.Peers, Peer{Address: netip.MustParseAddr(a), ASN: 64500})
	}
	s := must.Get(New(o))(t)
	var got []string
	for _, p := range s.Peers() {
		got = append(got, p.Peer.String())
	}
	if want := "192.0.2.1 192.0.2.2 192.0.2.3 2001:db8::1"; strings.Join(got, " ") != want {
		t.Errorf("peers %s, want %s", got, want)
	}
}
