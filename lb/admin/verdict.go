package admin

import (
	"fmt"
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

// Verdicts are all verdicts; the position is the exit code of "steelyard status --check".
var Verdicts = []Verdict{OK, Degraded, Down}

// behindTime is how long an update of the kernel may take.
const behindTime = 5 * time.Second

// judge sets the verdict, and the reasons for it: the most severe first.
func (i *Info) judge(st lb.Status, peers []lb.PeerStatus, now time.Time) {
	i.Verdict, i.Reasons = OK, []string{}
	reason := func(format string, args ...any) {
		if i.Verdict == OK {
			i.Verdict = Degraded
		}
		i.Reasons = append(i.Reasons, fmt.Sprintf(format, args...))
	}
	i.judgeRoutes(st, peers, reason)
	if !i.Behind.IsZero() && now.Sub(i.Behind) > behindTime {
		reason("the kernel lacks updates since %s", i.Behind.Format(time.RFC3339))
	}
	for _, x := range i.Interfaces {
		if x.Err != "" {
			reason("interface %s: %s", x.Name, x.Err)
		}
	}
	for _, x := range i.Problems {
		reason("%s", x)
	}
	if i.Cluster != nil && !i.Cluster.Away.IsZero() {
		reason("the API server is away since %s; its last known state is in force", i.Cluster.Away.Format(time.RFC3339))
	}
	if i.Drained != nil {
		switch {
		case i.Drained.Node:
			reason("the node is drained")
		case len(i.Drained.Services) > 0:
			reason("drained: %s", List(i.Drained.Services))
		}
	}
	if i.LoadError != "" {
		reason("the last reload was rejected")
	}
	if len(i.NeedRestart) > 0 {
		reason("a restart is needed to apply changes of: %s", List(i.NeedRestart))
	}
	bad := slices.DeleteFunc(slices.Clone(st.Backends), func(b lb.BackendStatus) bool {
		return b.State == lb.StateHealthy || b.State == lb.StateDraining
	})
	if n := len(bad); n > 0 {
		b := bad[0]
		reason("%d of %d backends are not healthy: %s of %s: %s", n, i.Backends, b.Address, b.Service,
			orElse(b.Reason, b.State.String()))
	}
}

// judgeRoutes finds addresses that should be announced and are not, and sessions that are not established.
func (i *Info) judgeRoutes(st lb.Status, peers []lb.PeerStatus, reason func(string, ...any)) {
	if i.Waiting != "" {
		reason("%s", i.Waiting)
		i.Verdict = Down
		return
	}
	if !st.Settled {
		reason("starting: the first health checks or the first sync of services is not complete")
		return
	}
	wanted, announced, missing, most := 0, 0, "", "" // missing is of the most frequent reason
	lacks := map[string]int{}                        // routes by reason
	for _, r := range st.Routes {
		if r.Intended {
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
		reason("no address is announced: %s", missing)
		i.Verdict = Down
	} else if announced < wanted {
		reason("%d of %d addresses are not announced: %s", wanted-announced, wanted, missing)
	}
	lower := slices.IndexFunc(st.Routes, func(r lb.RouteStatus) bool { return r.Announced && r.Reason != "" })
	if lower >= 0 {
		reason("%s is announced %s", st.Routes[lower].Address, st.Routes[lower].Reason)
	}
	if i.PeersUp == i.Peers {
		return
	}
	n := slices.IndexFunc(peers, func(p lb.PeerStatus) bool { return p.State != established })
	reason("%d of %d BGP sessions are not established: %s: %s", i.Peers-i.PeersUp, i.Peers, peers[n].Peer,
		orElse(peers[n].LastError, peers[n].State))
	if i.PeersUp == 0 && !i.L2 && wanted > 0 {
		i.Verdict = Down
	}
}

// established is the state of a BGP session that carries routes.
const established = "established"

func orElse(s, other string) string {
	if s == "" {
		return other
	}
	return s
}

// List is "a, b and 3 more".
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
