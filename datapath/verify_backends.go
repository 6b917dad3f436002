package datapath

import (
	"fmt"
	"net/netip"
	"slices"
	"time"

	"github.com/steelyard-lb/steelyard/lb"
)

// That packets of clients do not get to one backend of several withdraws no address: another node may do no better. But
// health checks may pass meanwhile, because their packets take another way, or there are none. So the status shows it.

// maxUnreached bounds the backends that are observed. There may be more.
const maxUnreached = 64

// unreached is a backend that a made packet did not get to.
type unreached struct {
	condition
	frontend lb.Frontend
	made     lb.Question
}

// tryBackends makes one more packet for each of some frontends, every time with another port, and repeats those that
// did not get to their backends. In the course of time all backends are tried.
func (v *verifier) tryBackends(frontends []lb.Frontend, now time.Time) {
	for id, u := range v.unreached {
		fault, tried := v.tryBackend(u.frontend, u.made)
		if tried != id {
			delete(v.unreached, id) // it gets no packets
			continue
		}
		if u.observe(fault, now); u.fault == "" {
			delete(v.unreached, id)
		}
	}
	for _, f := range frontends {
		s, ok := v.d.services.Subject(f)
		if !ok || len(v.unreached) >= maxUnreached {
			continue
		}
		client, ok := v.clients.of(f.VIP, s.Plan.Allow)
		if !ok {
			continue
		}
		made := lb.Question{
			Client: netip.AddrPortFrom(client, anyPort()),
			To:     netip.AddrPortFrom(f.VIP, f.Port), Protocol: f.Protocol,
		}
		fault, id := v.tryBackend(f, made)
		if fault == "" || v.unreached[id] != nil {
			continue
		}
		u := &unreached{frontend: f, made: made}
		u.observe(fault, now)
		v.unreached[id] = u
	}
}

// tryBackend returns which backend a made packet is for, and why it does not get there; "": it does.
func (v *verifier) tryBackend(f lb.Frontend, made lb.Question) (fault string, id uint32) {
	s, ok := v.d.services.Subject(f)
	if !ok {
		return "", 0
	}
	x, ok := v.run(opening(made))
	if !ok || !slices.Contains(s.Backends, x.V.Backend) {
		return "", 0
	}
	return v.faultOf(made, s, x), x.V.Backend
}

// unreachedBackends returns which backends packets of clients do not get to, while their addresses are announced.
func (v *verifier) unreachedBackends() []lb.Finding {
	v.mu.Lock()
	defer v.mu.Unlock()
	hosts, first, text := map[netip.Addr]bool{}, netip.AddrPort{}, ""
	for id, u := range v.unreached {
		if vip := v.bad.of(u.frontend); !u.confirmed || v.node.confirmed || vip != nil && vip.confirmed {
			continue // the reason of the route says it
		}
		at := v.d.services.Address(id)
		hosts[at.Addr()] = true
		if !first.IsValid() || at.Compare(first) < 0 {
			first, text = at, fmt.Sprintf("%s of %s: %s", at, u.frontend, u.fault)
		}
	}
	switch len(hosts) {
	case 0:
		return nil
	case 1:
		found := lb.FoundServerUnreached.About(first.String(), "packets of clients do not get to a server: %s", text)
		return []lb.Finding{found}
	}
	return []lb.Finding{lb.FoundServerUnreached.About("", "packets of clients do not get to %d servers, such as %s",
		len(hosts), text)}
}
