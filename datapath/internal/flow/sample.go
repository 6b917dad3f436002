package flow

import (
	"math/rand/v2"
	"net/netip"
	"time"

	"github.com/steelyard-lb/steelyard/datapath/internal/bpf"
	"github.com/steelyard-lb/steelyard/lb"
)

const (
	// sampledClients is the maximum number of clients that the verification checks.
	sampledClients = 64
	// KeepClients is how long a client is checked after its last flow has left the tables.
	KeepClients = 10 * time.Minute
)

// sampledClient is a client and the VIP that it used.
type sampledClient struct {
	lb.Question
	seen time.Time // zero until the walk ends
}

// sample is a uniform sample of the clients of flows (algorithm R, Vitter 1985). It never contains forged sources,
// because each client has proved that it receives replies.
type sample struct {
	seen int
	all  []sampledClient
}

func (s *sample) see(t bpf.GCTable, k bpf.ServerKey, f bpf.ServerFlow, vip func(uint32) netip.Addr) {
	// TCP and SCTP flows are in the stream table once the client has acknowledged a sequence number of the server.
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
		Client:   netip.AddrPortFrom(bpf.FromAddr(f.Client.Client), uint16(1024+rand.IntN(64000))),
		To:       netip.AddrPortFrom(vip(f.Client.Frontend), bpf.Swap(f.Client.Dport)),
		Protocol: lb.Protocol(k.Proto()),
	}
}

// after fills the sample with clients from previous walks, because connections may be short and rare.
func (s *sample) after(earlier []sampledClient, now time.Time) []sampledClient {
	have := map[lb.Question]bool{}
	for i := range s.all {
		s.all[i].seen = now
		have[s.all[i].Question] = true
	}
	for _, c := range earlier {
		if len(s.all) < sampledClients && !have[c.Question] && now.Sub(c.seen) < KeepClients {
			have[c.Question] = true
			s.all = append(s.all, c)
		}
	}
	return s.all
}

// RecentClients returns the sample of the last walk.
func (g *Collector) RecentClients() (all []lb.Question) {
	g.mu.Lock()
	defer g.mu.Unlock()
	for _, c := range g.clients {
		all = append(all, c.Question)
	}
	return all
}
