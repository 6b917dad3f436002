package doctor

import (
	"context"
	"fmt"
	"net/netip"
	"slices"
	"sync"
	"time"

	"github.com/steelyard-lb/steelyard/lb"
)

// Node is what the checks need to know about this node.
type Node struct {
	Status lb.Status
	Peers  []Peer
	// Away lists members of [l2] that do not respond, with their TCP port.
	Away []netip.AddrPort
	// AskOwn asks the links which other hosts answer for this node's addresses. It is nil if none is announced by ARP
	// and NDP.
	AskOwn func(context.Context) []lb.Finding
	Links  []string // on which they are announced
	// Members are the other members of [l2].
	Members []lb.MemberStatus
	// Permissions asks the API server what it does not permit the agent. It is nil without a cluster.
	Permissions func(context.Context) ([]lb.Finding, error)
	// Policies asks the API server for NetworkPolicies that do not admit clients. It is nil without a cluster.
	Policies func(context.Context) ([]lb.Finding, error)
}

// Peer is a BGP peer.
type Peer struct {
	lb.PeerStatus
	Port     uint16
	External bool           // its AS is not this node's
	Sent     []lb.SentRoute // that it has received
}

// established reports whether the session carries routes.
func (p Peer) established() bool { return p.Session != nil }

// check asks one question. notAsked says why it could not, or is "".
type check struct {
	name, expects string
	ask           func(context.Context, *Node) (found []lb.Finding, notAsked string)
}

var checks = []check{
	{"own-addresses", "no other host answers ARP or NDP for an address of this node", ownAddresses},
	{"strict-arp", "the kernel does not answer ARP for addresses on kube-ipvs0", strictARP},
	{"filters", "no filter on this node drops packets of checks, BGP or members", filters},
	{"routers", "no router lacks a route to an announced address", routers},
	{"speakers", "no other program on this node has a BGP session with a router", speakers},
	{"clocks", "the members' clocks agree with this node's", clocks},
	{"permissions", "the API server permits what the agent needs", permissions},
	{"network-policies", "NetworkPolicies admit the clients of Services", networkPolicies},
	{"server-routes", "answers of servers arrive through their routers", serverRoutes},
	{"mtu", "large packets reach servers and routers", mtu},
}

// limit bounds each check. They run concurrently, and each knows how long it waits; this is for a busy machine.
const limit = 10 * time.Second

// targetsMax bounds how many addresses a check asks.
const targetsMax = 1000

// Examine runs all checks. It returns after at most ten seconds.
func Examine(ctx context.Context, n *Node) []lb.Diagnosis {
	ctx, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	all := make([]lb.Diagnosis, len(checks))
	var running sync.WaitGroup
	for i, c := range checks {
		running.Go(func() {
			found, notAsked := c.ask(ctx, n)
			if notAsked == "" && len(found) == 0 && ctx.Err() != nil {
				notAsked = "there was not enough time"
			}
			all[i] = lb.Diagnosis{Check: c.name, Expects: c.expects, Findings: found, NotAsked: notAsked}
		})
	}
	running.Wait()
	return all
}

func ownAddresses(ctx context.Context, n *Node) ([]lb.Finding, string) {
	if n.AskOwn == nil {
		return nil, "no address is announced by ARP and NDP"
	}
	return n.AskOwn(ctx), ""
}

func permissions(ctx context.Context, n *Node) ([]lb.Finding, string) {
	return askCluster(ctx, n.Permissions)
}

// networkPolicies returns one finding, because a policy may concern many Services.
func networkPolicies(ctx context.Context, n *Node) ([]lb.Finding, string) {
	found, notAsked := askCluster(ctx, n.Policies)
	var faults []fault
	for _, f := range found {
		faults = append(faults, fault{f.Object, f.Text})
	}
	return merged(lb.FoundNetworkPolicy, faults), notAsked
}

// askCluster asks the API server. ask is nil without a cluster.
func askCluster(ctx context.Context, ask func(context.Context) ([]lb.Finding, error)) ([]lb.Finding, string) {
	if ask == nil {
		return nil, "there is no cluster"
	}
	found, err := ask(ctx)
	if err != nil {
		return nil, cannotAsk(err)
	}
	return found, ""
}

// servers returns the addresses of the backends that the methods forward to, in order.
func (n *Node) servers(methods ...lb.Method) (all []netip.Addr) {
	known := map[netip.Addr]bool{}
	for _, s := range n.Status.Services {
		if !slices.Contains(methods, s.Forward) {
			continue
		}
		for _, b := range s.Backends {
			if !known[b.Address] && len(all) < targetsMax {
				known[b.Address] = true
				all = append(all, b.Address)
			}
		}
	}
	return all
}

// fault is a fault of one object.
type fault struct{ object, text string }

// merged returns one finding for faults of the same kind, or none.
func merged(kind *lb.FindingKind, faults []fault) []lb.Finding {
	switch len(faults) {
	case 0:
		return nil
	case 1:
		return []lb.Finding{kind.About(faults[0].object, "%s", faults[0].text)}
	}
	return []lb.Finding{kind.About("", "%s; and %d more like this, such as %s", faults[0].text, len(faults)-1,
		faults[1].object)}
}

// pause waits, and reports whether there is time left.
func pause(ctx context.Context, d time.Duration) bool {
	select {
	case <-ctx.Done():
		return false
	case <-time.After(d):
		return true
	}
}

// soon returns when a time from now has passed, or when ctx ends if that is earlier.
func soon(ctx context.Context, d time.Duration) time.Time {
	at := time.Now().Add(d)
	if end, ok := ctx.Deadline(); ok && end.Before(at) {
		return end
	}
	return at
}

// failing returns those for which works returns false. It asks about all concurrently. The end of ctx may be the cause
// of a failure, so then it proves nothing.
func failing[T any](ctx context.Context, all []T, works func(T) bool) (failed []T) {
	fails := make([]bool, len(all))
	var asking sync.WaitGroup
	for i, x := range all {
		if !pace(ctx, i) {
			break
		}
		asking.Go(func() { fails[i] = !works(x) && ctx.Err() == nil })
	}
	asking.Wait()
	for i, x := range all {
		if fails[i] {
			failed = append(failed, x)
		}
	}
	return failed
}

func cannotAsk(err error) string { return fmt.Sprintf("cannot ask: %v", err) }
