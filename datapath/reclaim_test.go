package datapath

import (
	"strings"
	"testing"
	"time"

	"github.com/cilium/ebpf"

	"github.com/steelyard-lb/steelyard/datapath/dptest"
	"github.com/steelyard-lb/steelyard/datapath/internal/bpf"
	"github.com/steelyard-lb/steelyard/lb"
	"github.com/steelyard-lb/steelyard/lb/lbtest/must"
)

// agentGone simulates that no agent has run for a minute.
func (fx *fixture) agentGone() {
	fx.t.Helper()
	for i, c := range entries[uint32, bpf.Collector](fx.t, fx.d.objects.SyCollector) {
		c.Seen = bpf.FlowClock(bpf.Uptime() - time.Minute)
		fx.put(fx.d.objects.SyCollector, i, c)
	}
}

// ageFlows backdates the client's flows on these ports.
func (fx *fixture) ageFlows(by time.Duration, first, last int) {
	fx.t.Helper()
	of := func(k bpf.ClientKey) bool {
		port := int(bpf.Swap(k.Sport)) - 20000
		return port >= first && port <= last
	}
	for _, t := range fx.d.objects.FlowTables()[1:] {
		for k, f := range entries[bpf.ServerKey, bpf.ServerFlow](fx.t, t.Servers) {
			if of(f.Client) {
				f.F.Seen -= bpf.FlowClock(by)
				fx.put(t.Servers, k, f)
			}
		}
		for k, f := range entries[bpf.ClientKey, bpf.ClientFlow](fx.t, t.Clients) {
			if of(k) {
				f.F.Seen -= bpf.FlowClock(by)
				fx.put(t.Clients, k, f)
			}
		}
	}
}

func (fx *fixture) put(m *ebpf.Map, k, v any) {
	fx.t.Helper()
	must.Do(fx.t, m.Put(k, v))
}

// openFlow opens the client's i-th flow. It returns the reason if it cannot.
func (fx *fixture) openFlow(proto lb.Protocol, i int) string {
	fx.t.Helper()
	if proto == lb.UDP {
		if r := fx.run(fx.on(i, dptest.UDP, 0).Frame()); r.did != "sent" {
			return r.reason
		}
		fx.went(fx.reply(0))
		fx.went(fx.on(i, dptest.UDP, 0))
		return ""
	}
	fx.went(fx.on(i, dptest.TCP, dptest.SYN))
	fx.went(fx.reply(dptest.SYN | dptest.ACK))
	reason := fx.run(fx.on(i, dptest.TCP, dptest.ACK).Frame()).reason
	return strings.TrimPrefix(reason, forwarded)
}

// goesOn checks that a flow is open in both directions.
func (fx *fixture) goesOn(proto lb.Protocol, i int) {
	fx.t.Helper()
	flags := dptest.ACK * bpf.Truth(proto == lb.TCP)
	fx.went(fx.on(i, uint8(proto), flags))
	fx.went(fx.reply(flags))
}

// Without an agent, ended and silent flows make space for many times as many new flows as the table has entries. Live
// flows stay.
func TestFlowsEndWithoutAnAgent(t *testing.T) {
	t.Parallel()
	const size, rounds = 96, 6
	for name, x := range map[string]struct {
		proto lb.Protocol
		ends  func(fx *fixture, i int) // ends a flow, which is then idle for this long
		idle  time.Duration
	}{
		"ended": {lb.TCP, func(fx *fixture, i int) {
			p := fx.on(i, dptest.TCP, dptest.RST)
			p.Seq += 5
			fx.went(p)
		}, time.Minute},
		"silent":         {lb.TCP, nil, 3 * time.Hour},
		"half-open, UDP": {lb.UDP, nil, 10 * time.Minute},
	} {
		t.Run(name, func(t *testing.T) {
			eachOnce(t, func(t *testing.T, h hookName, v6 bool) {
				fx := shared(t, h, v6, func(o *Options) { o.MaxFlows = size })
				fx.service(x.proto, "b1", "b2")
				room := size
				if x.proto == lb.UDP {
					room = size / udpPart / 2 // a frontend's share
				}
				fx.agentGone()
				const live = 4
				for i := range live {
					why := fx.openFlow(x.proto, i)
					must.Need(t, why == "", "flow %d: %s", i, why)
				}
				at := live
				for range rounds {
					first := at
					for range room / 2 {
						why := fx.openFlow(x.proto, at)
						must.True(t, why == "", "flow %d: %s", at, why)
						at++
					}
					for i := first; i < at; i++ {
						fx.goesOn(x.proto, i)
						if x.ends != nil {
							x.ends(fx, i)
						}
					}
					fx.ageFlows(x.idle, first, at)
				}
				for i := range live {
					fx.goesOn(x.proto, i)
				}
			})
		})
	}
}

// Without an agent, a flow is stored only with a place. If the agent ends while the table is full, half of the flows
// have a place, and the other half are served without one. Live flows are never removed, and flows for which there is
// no entry are refused.
func TestFullTableWithoutAnAgent(t *testing.T) {
	t.Parallel()
	const size = 96
	fx := shared(t, hookXDP, false, func(o *Options) { o.MaxFlows = size })
	fx.service(lb.TCP, "b1", "b2")
	places := func() (n int) {
		var l bpf.PlaceLine
		for i := range fx.d.objects.SyStreamPlaces.MaxEntries() {
			must.Do(t, fx.d.objects.SyStreamPlaces.Lookup(i, &l))
			for _, k := range l.Keys {
				if k != (bpf.ServerKey{}) {
					n++
				}
			}
		}
		return n
	}
	fx.agentGone()
	stored := 0
	for i := range size {
		if fx.openFlow(lb.TCP, i) == "" {
			stored++
		}
	}
	n := places()
	must.True(t, n == stored && n >= size/2 && n != size,
		"without an agent, %d of %d flows are stored, with %d places", stored, size, n)
	fx.reset()
	fx.service(lb.TCP, "b1", "b2")
	for i := range size {
		why := fx.openFlow(lb.TCP, i)
		must.Need(t, why == "", "flow %d: %s", i, why)
		if i == size/4 { // flows that were stored before count as well
			fx.collect()
		}
		n := places()
		must.Need(t, (i >= size/2 || n == 0) && n <= size/2, "%d flows have %d places", i+1, n)
	}
	n = places()
	must.True(t, n >= size*2/5, "%d flows have %d places", size, n)
	must.Row(t, "one more flow", "flows_full", fx.openFlow(lb.TCP, size))
	fx.agentGone()
	for i := size; i < size+10; i++ {
		must.Row(t, "with live flows only", "flows_full", fx.openFlow(lb.TCP, i))
	}
	must.Row(t, "live flows", size, len(fx.confirmed().servers))
	fx.ageFlows(3*time.Hour, 0, size)
	for i := range 4 * size {
		why := fx.openFlow(lb.TCP, 1000+i)
		must.True(t, why == "", "flow %d: %s", i, why)
		if i >= 20 {
			fx.ageFlows(3*time.Hour, 1000+i-20, 1000+i-20)
			fx.goesOn(lb.TCP, 1000+i-10)
		}
	}
	fx.collect() // an agent is back
	n = len(fx.confirmed().servers)
	must.True(t, n <= 30, "%d flows are left when the agent is back", n)
}

// The tables of DSR flows are LRU maps, which need no agent: entries of ended flows are replaced, and flows with
// packets stay.
func TestDirectReturnFlowsEndWithoutAnAgent(t *testing.T) {
	t.Parallel()
	fx := shared(t, hookXDP, false, nil)
	fx.byTunnel(func(*lb.Service) {})
	fx.agentGone()
	server := fx.went(fx.on(0, dptest.TCP, dptest.SYN))
	m := fx.d.objects.SyDsrFlows
	ended := bpf.DSRFlow{State: uint8(bpf.FlowClosed), Method: uint8(bpf.MethodGUE)}
	for i := range int(m.MaxEntries()) * 5 / 4 {
		k := bpf.FlowKey{Proto: dptest.TCP}
		k.T.Src.W[3], k.T.Sport = uint32(i), uint16(i)
		fx.put(m, &k, &ended)
		if i%256 == 0 {
			to := fx.went(fx.on(0, dptest.TCP, dptest.ACK))
			must.Need(t, to == server, "after %d flows, the live one went to %s; before to %s", i, to, server)
		}
	}
	for i := range 100 {
		to := fx.went(fx.on(1+i, dptest.TCP, dptest.SYN))
		for range 2 {
			again := fx.went(fx.on(1+i, dptest.TCP, dptest.ACK))
			must.True(t, again == to, "flow %d went to %s and %s", i, to, again)
		}
	}
}
