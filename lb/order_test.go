package lb

import (
	"math/rand/v2"
	"testing"

	"github.com/steelyard-lb/steelyard/lb/lbtest/must"
)

// model is one consumer of one VIP: the change happens at any step of a call, or not at all when the call fails.
type model struct {
	Known
	real bool
}

func (m *model) start(goal bool) {
	if !m.Busy && m.Done != goal {
		m.Busy, m.Goal = true, goal
	}
}

func (m *model) step(r *rand.Rand) {
	if !m.Busy {
		return
	}
	switch r.IntN(3) {
	case 0: // the change happens, the call has not returned
		m.real = m.Goal
	case 1: // the call returns, after the change or without it
		m.Known = Known{Done: m.real}
	}
}

// play runs one random interleaving and reports whether the VIP was never announced without being served.
func play(t *testing.T, seed uint64, serve func(bool, Known) bool, announce func(bool, bool, Known) bool) bool {
	r := rand.New(rand.NewPCG(seed, 1))
	var want, healthy bool
	var datapath, announcer model
	for range 400 {
		switch r.IntN(6) {
		case 0:
			want = !want
		case 1:
			healthy = !healthy
		case 2:
			datapath.step(r)
		case 3:
			announcer.step(r)
		case 4:
			datapath.start(serve(want, announcer.Known))
		case 5:
			announcer.start(announce(want, healthy, datapath.Known))
		}
		if announcer.real && !datapath.real {
			return false
		}
	}
	for range 300 {
		datapath.step(r)
		announcer.step(r)
		datapath.start(serve(want, announcer.Known))
		announcer.start(announce(want, healthy, datapath.Known))
	}
	must.True(t, announcer.real == (want && healthy) && datapath.real == want,
		"seed %d: want %v healthy %v ended with served %v announced %v", seed, want, healthy, datapath.real,
		announcer.real)
	return true
}

func TestOrderNeverAnnouncesWhatIsNotServed(t *testing.T) {
	for seed := range uint64(20_000) {
		must.Need(t, play(t, seed, Serve, Announce), "seed %d: announced without being served", seed)
	}
}

// The simpler rules, which rely on the last confirmation, must fail the same test, or it proves nothing.
func TestOrderTestCanFail(t *testing.T) {
	bad := 0
	for seed := range uint64(200) {
		if !play(t, seed,
			func(want bool, announce Known) bool { return want || announce.Done },
			func(want, healthy bool, datapath Known) bool { return want && healthy && datapath.Done }) {
			bad++
		}
	}
	must.True(t, bad != 0, "the naive rules passed; want violations")
}
