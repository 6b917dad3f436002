package datapath

import (
	"fmt"
	"math/rand/v2"
	"net/netip"
	"time"

	"github.com/steelyard-lb/steelyard/datapath/internal/bpf"
	"github.com/steelyard-lb/steelyard/lb"
)

const (
	// sampledClients is the number of clients that the verification looks at.
	sampledClients = 64
	// keepClients is how long a client is checked after its last flow has left the tables.
	keepClients = 10 * time.Minute
)

// sampledClient is a client, with the VIP that it used.
type sampledClient struct {
	lb.Question
	seen time.Time // zero if in this walk
}

// clientSample is a uniform sample of the clients of flows (algorithm R, Vitter 1985). Each client has proved that it
// receives replies, so forged sources are never sampled.
type clientSample struct {
	seen int
	all  []sampledClient
}

func (s *clientSample) see(t bpf.GCTable, k bpf.ServerKey, f bpf.ServerFlow, vip func(uint32) netip.Addr) {
	// A TCP or SCTP flow is in that table once the client has acknowledged a sequence number of the server.
	if t != bpf.GCStream && bpf.FlowState(f.F.State) != bpf.FlowEstablished {
		return
	}
	s.seen++
	i := len(s.all)
	if i == sampledClients {
		if i = rand.IntN(s.seen); i >= sampledClients {
			return
		}
	} else {
		s.all = append(s.all, sampledClient{})
	}
	s.all[i].Question = lb.Question{
		Client:   netip.AddrPortFrom(bpf.FromAddr(f.Client.Client), anyPort()),
		To:       netip.AddrPortFrom(vip(f.Client.Frontend), bpf.Swap(f.Client.Dport)),
		Protocol: lb.Protocol(k.Proto()),
	}
}

// after completes the sample with clients of earlier walks, because connections may be short and rare.
func (s *clientSample) after(earlier []sampledClient, now time.Time) []sampledClient {
	have := map[lb.Question]bool{}
	for i := range s.all {
		s.all[i].seen = now
		have[s.all[i].Question] = true
	}
	for _, c := range earlier {
		if len(s.all) < sampledClients && !have[c.Question] && now.Sub(c.seen) < keepClients {
			have[c.Question] = true
			s.all = append(s.all, c)
		}
	}
	return s.all
}

// recentClients returns the sample of the last walk.
func (g *flowGC) recentClients() (all []lb.Question) {
	g.mu.Lock()
	defer g.mu.Unlock()
	for _, c := range g.clients {
		all = append(all, c.Question)
	}
	return all
}

// lostClients returns a text about the sampled clients that would not get a reply, or "" if all would. It checks lost
// clients again until they get replies, or for keepClients, because they are not in later samples.
func (v *verifier) lostClients(sample []lb.Question, now time.Time) string {
	was := v.warned.lostSince
	v.warned.lostSince = map[lb.Question]time.Time{}
	all := map[lb.Question]time.Time{}
	for q, since := range was {
		if now.Sub(since) < keepClients {
			all[q] = since
		}
	}
	for _, q := range sample {
		if _, ok := all[q]; !ok {
			all[q] = now
		}
	}
	first, text := netip.Addr{}, ""
	for q, since := range all {
		fault := v.clientFault(q)
		if fault == "" {
			continue
		}
		v.warned.lostSince[q] = since
		if a := q.Client.Addr(); !first.IsValid() || a.Less(first) {
			first, text = a, fmt.Sprintf("%s: %s", a, fault)
		}
	}
	if text == "" {
		return ""
	}
	return fmt.Sprintf("replies do not get to %d of %d sampled clients, such as %s",
		len(v.warned.lostSince), len(all), text)
}

// clientFault returns why a client would not get a reply although its packets are forwarded, or "" if it would.
func (v *verifier) clientFault(q lb.Question) string {
	if !q.To.Addr().IsValid() {
		return "" // the frontend was removed
	}
	x, ok := v.run(opening(q))
	if !ok || v.d.actions[x.V.Action] != "forward" {
		return ""
	}
	return v.replyFault(q, x, x.V.Local == 1)
}
