package datapath

import (
	"fmt"
	"math/rand/v2"
	"net/netip"

	"github.com/steelyard-lb/steelyard/lb"
)

// sampledClients is how many clients the verification looks at.
const sampledClients = 64

// clientSample is a uniform sample of the clients of established flows (algorithm R, Vitter 1985). A client has proved
// that replies get to it, so an invented source is in no sample.
type clientSample struct {
	seen int
	all  []lb.Question
}

func (s *clientSample) see(k syServerKey, f syServerFlow, vip func(uint32) netip.Addr) {
	if syFlowState(f.F.State) != syFlowStateFLOW_ESTABLISHED {
		return
	}
	s.seen++
	i := len(s.all)
	if i == sampledClients {
		if i = rand.IntN(s.seen); i >= sampledClients {
			return
		}
	} else {
		s.all = append(s.all, lb.Question{})
	}
	s.all[i] = lb.Question{
		Client:   netip.AddrPortFrom(fromAddr(f.Client.Client), anyPort),
		To:       netip.AddrPortFrom(vip(f.Client.Frontend), swap(f.Client.Dport)),
		Protocol: lb.Protocol(k.proto()),
	}
}

// recentClients returns the sample of the last walk.
func (g *flowGC) recentClients() []lb.Question {
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.clients
}

// lostClients returns which of the clients of a sample would not get a reply, as a text; "": all would.
func (v *verifier) lostClients(sample []lb.Question) string {
	lost, first := 0, ""
	for _, q := range sample {
		if !q.To.Addr().IsValid() {
			continue // the frontend was removed
		}
		x, ok := v.run(opening(q))
		if !ok || v.d.actions[x.V.Action] != "forward" {
			continue
		}
		fault := v.replyFault(q, x, x.V.Local == 1)
		if fault == "" {
			continue
		}
		if lost++; first == "" {
			first = fmt.Sprintf("%s: %s", q.Client.Addr(), fault)
		}
	}
	if lost == 0 {
		return ""
	}
	return fmt.Sprintf("replies do not get to %d of %d sampled clients, such as %s", lost, len(sample), first)
}
