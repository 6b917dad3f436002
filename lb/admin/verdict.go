package admin

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"time"

	"github.com/steelyard-lb/steelyard/lb"
)

// Verdict is the state of the agent in one word.
type Verdict string

const (
	OK       Verdict = "OK"
	Degraded Verdict = "DEGRADED" // it works, and something needs attention
	Down     Verdict = "DOWN"     // no address is reachable through this node, although some should be
)

// Verdicts are all verdicts. A verdict's index is the exit code of "steelyard status --check".
var Verdicts = []Verdict{OK, Degraded, Down}

// behindTime is how long an update of the kernel may take.
const behindTime = 5 * time.Second

// judge adds the findings that follow from the state of the engine and of the sessions, and sets the verdict.
func (i *Info) judge(st lb.Status, peers []lb.PeerStatus, now time.Time) {
	i.Findings = listOf(slices.Concat(i.unreachable(st, peers), i.unsettled(now), i.Findings, unhealthy(st),
		silent(st, now)))
	slices.SortStableFunc(i.Findings, func(a, b lb.Finding) int { return b.Severity.Compare(a.Severity) })
	i.Verdict, i.Reasons, i.Warnings = OK, []string{}, nil
	for _, f := range i.Findings {
		if f.Severity == lb.SeverityWarning {
			i.Warnings = append(i.Warnings, f.Text)
			continue
		}
		i.Reasons = append(i.Reasons, f.Text)
	}
	if len(i.Reasons) > 0 {
		i.Verdict = Degraded
	}
	if len(i.Reasons) > 0 && i.Findings[0].Severity == lb.SeverityDown {
		i.Verdict = Down
	}
}

// unsettled finds what this node has not yet put into effect.
func (i *Info) unsettled(now time.Time) (all []lb.Finding) {
	add := func(f lb.Finding) { all = append(all, f) }
	if !i.Behind.IsZero() && now.Sub(i.Behind) > behindTime {
		add(lb.FoundKernelBehind.About("", "the kernel has lacked updates since %s", i.Behind.Format(time.RFC3339)))
	}
	for _, x := range i.Interfaces {
		if x.Err != "" {
			add(lb.FoundInterface.About(x.Name, "interface %s: %s", x.Name, x.Err))
		}
	}
	if i.Cluster != nil && !i.Cluster.Away.IsZero() {
		add(lb.FoundAPIServerAway.About("", "the API server has not answered since %s; its last known state is used",
			i.Cluster.Away.Format(time.RFC3339)))
	}
	switch {
	case i.Drained == nil:
	case i.Drained.Node:
		add(lb.FoundDrained.About("", "the node is drained"))
	default:
		add(lb.FoundDrained.About("", "drained: %s", List(i.Drained.Names())))
	}
	if len(i.Weights) > 0 {
		names := lb.Drains{Weights: i.Weights}.WeightNames()
		add(lb.FoundWeights.About("", "weights set by the operator: %s", List(names)))
	}
	if i.LoadError != "" {
		add(lb.FoundReloadRejected.About(i.Config, "the last reload was rejected"))
	}
	if len(i.NeedRestart) > 0 {
		add(lb.FoundRestartNeeded.About("", "a restart is needed to apply changes to: %s", List(i.NeedRestart)))
	}
	return all
}

// unhealthy finds backends that are not healthy.
func unhealthy(st lb.Status) []lb.Finding {
	bad := slices.DeleteFunc(slices.Clone(st.Backends), func(b lb.BackendStatus) bool {
		return b.State == lb.StateHealthy || b.State == lb.StateDraining
	})
	if len(bad) == 0 {
		return nil
	}
	b := bad[0]
	if servers, span, ok := together(bad); ok && len(bad) == len(st.Backends) {
		const text = "all %d backends, on %d servers, failed within %s: %s"
		return []lb.Finding{lb.FoundAllBackendsDown.About("", text, len(bad), servers, span.Round(time.Millisecond),
			orElse(b.Reason, b.State.String()))}
	}
	return []lb.Finding{lb.FoundBackendDown.About("", "%d of %d backends are not healthy: %s of %s: %s%s", len(bad),
		len(st.Backends), netip.AddrPortFrom(b.Address, b.Port), b.Service, orElse(b.Reason, b.State.String()),
		onlyLocal(st.Backends, b))}
}

// onlyLocal returns a likely cause if b is a node port of Kubernetes that times out on some nodes only, or "".
func onlyLocal(all []lb.BackendStatus, b lb.BackendStatus) string {
	answers := slices.ContainsFunc(all, func(o lb.BackendStatus) bool {
		return o.State == lb.StateHealthy && o.Service == b.Service && o.Port == b.Port
	})
	if !answers || b.Port < 30000 || b.Port > 32767 || !strings.HasPrefix(b.Reason, lb.NoResponse) {
		return ""
	}
	return "; with externalTrafficPolicy: Local, only nodes with an endpoint answer on a node port"
}

// silentTime is how long an announced address may receive no client packets if it received at least one per second
// before.
const silentTime = time.Minute

// silent finds announced addresses that clients no longer send packets to.
func silent(st lb.Status, now time.Time) []lb.Finding {
	latest := map[netip.Addr]lb.Traffic{} // of the address's frontends
	for _, s := range st.Services {
		switch x := latest[s.Address]; {
		case s.Last.After(x.Last):
			latest[s.Address] = s.Traffic
		case s.Last.Equal(x.Last):
			x.Before += s.Before
			latest[s.Address] = x
		}
	}
	var first string
	addresses := 0
	for _, r := range st.Routes {
		x := latest[r.Address]
		if !r.Announced || x.Before < 1 || now.Sub(x.Last) < silentTime || now.Sub(r.Since) < silentTime {
			continue
		}
		if addresses++; addresses == 1 {
			first = fmt.Sprintf("no packet for %s since %s (%.0f/s before)", r.Address, x.Last.Format(time.TimeOnly),
				x.Before)
		}
	}
	switch addresses {
	case 0:
		return nil
	case 1:
		return []lb.Finding{lb.FoundNoPackets.About("", "%s", first)}
	}
	return []lb.Finding{lb.FoundNoPackets.About("", "%s; %d addresses are affected", first, addresses)}
}

// togetherTime is longer than the interval of most checks. Servers that fail within it probably have a common cause.
const togetherTime = 5 * time.Second

// together reports whether backends on several servers failed at about the same time, on how many servers, and within
// what time.
func together(bad []lb.BackendStatus) (servers int, span time.Duration, ok bool) {
	hosts, first, last := map[netip.Addr]bool{}, bad[0].Since, bad[0].Since
	for _, b := range bad {
		if b.State != lb.StateUnhealthy {
			return 0, 0, false
		}
		hosts[b.Address] = true
		if b.Since.Before(first) {
			first = b.Since
		}
		if b.Since.After(last) {
			last = b.Since
		}
	}
	span = last.Sub(first)
	return len(hosts), span, len(hosts) > 1 && span <= togetherTime
}

// unreachable finds addresses that should be announced but are not, ports of announced addresses without a healthy
// backend, and sessions that are not established.
func (i *Info) unreachable(st lb.Status, peers []lb.PeerStatus) (all []lb.Finding) {
	if i.Waiting != "" {
		return []lb.Finding{lb.FoundWaiting.About("", "%s", i.Waiting)}
	}
	if !st.Settled {
		return []lb.Finding{lb.FoundStarting.About("",
			"starting: the first health checks or the first sync of services is not complete")}
	}
	add := func(f lb.Finding) { all = append(all, f) }
	wanted, announced, missing, most := 0, 0, "", "" // missing has the most frequent reason
	lacks := map[string]int{}                        // routes by reason
	for _, r := range st.Routes {
		if r.Intended && !r.Announced {
			continue
		}
		wanted++
		announced += one(r.Announced)
		if r.Announced {
			continue
		}
		why := strings.TrimPrefix(r.Reason, r.Address.String()+" ")
		if lacks[why]++; missing == "" || lacks[why] > lacks[most] {
			most, missing = why, fmt.Sprintf("%s: %s", r.Address, why)
		}
	}
	if wanted > 0 && announced == 0 {
		add(lb.FoundNothingAnnounced.About("", "no address is announced: %s", missing))
	} else if announced < wanted {
		add(lb.FoundNotAnnounced.About("", "%d of %d addresses are not announced: %s", wanted-announced, wanted,
			missing))
	}
	all = append(all, portsDown(st.Services)...)
	lower := slices.IndexFunc(st.Routes, func(r lb.RouteStatus) bool {
		return r.Announced && r.Reason != "" && !r.Intended
	})
	if lower >= 0 {
		r := st.Routes[lower]
		add(lb.FoundLessPreferred.About("", "%s is announced %s", r.Address, r.Reason))
	}
	if i.PeersUp == i.Peers {
		return all
	}
	kind := lb.FoundSessionDown
	if i.PeersUp == 0 && wanted > 0 {
		kind = lb.FoundNoSession
	}
	n := slices.IndexFunc(peers, func(p lb.PeerStatus) bool { return p.State != established })
	f := kind.About("", "%d of %d BGP sessions are not established: %s: %s", i.Peers-i.PeersUp, i.Peers, peers[n].Peer,
		orElse(peers[n].LastError, peers[n].State))
	if i.L2 { // which may announce some addresses
		f = f.As(lb.SeverityDegraded)
	}
	return append(all, f)
}

// portsDown finds ports of announced addresses whose backends are all unhealthy.
func portsDown(services []lb.ServiceStatus) []lb.Finding {
	var first string
	down := 0
	for _, s := range services {
		if !s.NoneHealthy() {
			continue
		}
		if down++; down == 1 {
			first = fmt.Sprintf("%s of %s: none of its backends is healthy (0 of %d)",
				s.Frontend(), s.Service, len(s.Backends))
		}
	}
	switch down {
	case 0:
		return nil
	case 1:
		return []lb.Finding{lb.FoundPortDown.About("", "%s", first)}
	}
	return []lb.Finding{lb.FoundPortDown.About("", "%d ports of announced addresses have no healthy backend: %s",
		down, first)}
}

// established is the state of a BGP session that carries routes.
const established = "established"

func orElse(s, other string) string {
	if s == "" {
		return other
	}
	return s
}

// List returns "a, b and 3 more".
func List(names []string) string {
	const shown = 5
	text := ""
	for n, name := range names {
		if n == shown {
			return fmt.Sprintf("%s and %d more", text, len(names)-shown)
		}
		if n > 0 {
			text += ", "
		}
		text += name
	}
	return text
}
