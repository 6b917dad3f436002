package verify

import (
	"fmt"
	"net/netip"
	"slices"
	"time"

	"github.com/steelyard-lb/steelyard/lb"
)

// If client packets do not reach one backend of several, no address is withdrawn, because another node may do no
// better. But there may be no health checks, or they may pass because their packets take another path. So the status
// reports the backend.

// maxUnreached bounds the number of observed backends. More may be unreached.
const maxUnreached = 64

// unreached is a backend that a synthetic packet did not reach.
type unreached struct {
	condition
	frontend lb.Frontend
	made     lb.Question
}

// tryBackends runs one more synthetic packet for each of these frontends, from a different port each time, and repeats
// packets that did not reach their backends. Over time it tries all backends.
func (v *Verifier) tryBackends(frontends []lb.Frontend, now time.Time) {
	for id, u := range v.unreached {
		fault, tried := v.tryBackend(u.frontend, u.made)
		if tried != id {
			delete(v.unreached, id) // the backend no longer receives these packets
			continue
		}
		if u.observe(fault, now); u.fault == "" {
			delete(v.unreached, id)
		}
	}
	for _, f := range frontends {
		s, ok := v.Services.Subject(f)
		if !ok || len(v.unreached) >= maxUnreached {
			continue
		}
		made, ok := v.question(f, s)
		if !ok {
			continue
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

// tryBackend returns the backend of a synthetic packet and why the packet does not reach it, or "" if it does.
func (v *Verifier) tryBackend(f lb.Frontend, made lb.Question) (fault string, id uint32) {
	s, ok := v.Services.Subject(f)
	if !ok {
		return "", 0
	}
	x, ok := v.run(opening(made))
	if !ok || !slices.Contains(s.Backends, x.V.Backend) {
		return "", 0
	}
	return v.faultOf(made, s, x), x.V.Backend
}

// unreachedBackends returns a finding about backends that client packets do not reach although their VIPs are
// announced.
func (v *Verifier) unreachedBackends() []lb.Finding {
	v.Mu.Lock()
	defer v.Mu.Unlock()
	hosts, first, text := map[netip.Addr]bool{}, netip.AddrPort{}, ""
	for id, u := range v.unreached {
		if vip := v.bad.of(u.frontend); !u.confirmed || v.node.confirmed || vip != nil && vip.confirmed {
			continue // the VIP's fault already says so
		}
		at := v.Services.Way(id).At
		hosts[at.Addr()] = true
		if !first.IsValid() || at.Compare(first) < 0 {
			first, text = at, fmt.Sprintf("%s of %s: %s", at, u.frontend, u.fault)
		}
	}
	switch len(hosts) {
	case 0:
		return nil
	case 1:
		found := lb.FoundServerUnreached.About(first.String(), "client packets do not reach a server: %s", text)
		return []lb.Finding{found}
	}
	return []lb.Finding{lb.FoundServerUnreached.About("", "client packets do not reach %d servers, such as %s",
		len(hosts), text)}
}
