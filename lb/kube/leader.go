package kube

import (
	"context"
	"crypto/sha256"
	"fmt"
	"log/slog"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/record"

	"github.com/steelyard-lb/steelyard/lb"
)

// finalizer keeps a deleted Service until its addresses are released (k8s.io/cloud-provider/service/helpers).
const finalizer = "service.kubernetes.io/load-balancer-cleanup"

// Allocator assigns addresses to Services while this agent is the leader.
type Allocator struct {
	o      AllocatorOptions
	events record.EventRecorder
	leader atomic.Value         // string: the node that assigns addresses
	last   atomic.Pointer[told] // what was decided last, or nil
	// blocked is why this agent assigns nothing although it leads, or nil.
	blocked atomic.Pointer[error]
	// unready is the number of agent pods if none is ready, or 0.
	unready atomic.Int64
	// stuck holds the versions of Services that cannot be handled. Such a Service stays unchanged until its version
	// changes.
	stuck sync.Map

	mu    sync.Mutex // guards all below
	pools []Pool
	nodes int // nodes that may have addresses
	// poolNodes is like that of assigner.
	poolNodes []poolNode
	// excluded is the number of nodes that may not have addresses, for the message that no node may.
	excluded int
	term     *term              // nil if not leading
	again    context.CancelFunc // ends the term to start one with other pools, or nil without a term
}

// Leader returns the node that assigns addresses, or "" if there is none or it is not known yet.
func (a *Allocator) Leader() string {
	name, _ := a.leader.Load().(string)
	return name
}

// Last returns what this process decided last about a Service's addresses and when, or "" if it has decided nothing.
func (a *Allocator) Last() (text string, at time.Time) {
	if l := a.last.Load(); l != nil {
		text, at = l.text, l.at
	}
	return text, at
}

func (a *Allocator) decided(service, format string, args ...any) {
	a.last.Store(&told{service + ": " + fmt.Sprintf(format, args...), time.Now()})
}

// AllocatorOptions configures an Allocator.
type AllocatorOptions struct {
	Client kubernetes.Interface
	// Lease is the client for the election. Its requests must time out after a few seconds, because the last one delays
	// shutdown while the API server does not answer.
	Lease     kubernetes.Interface
	Node      string   // the identity in the election
	Namespace string   // of the Lease
	Classes   []string // like Options.Classes; the first names the Lease and the field manager
	Pools     []Pool
	// NoAnnouncer means that the nodes announce nothing.
	NoAnnouncer bool
	// IgnoreExclude lets nodes announce despite the label that excludes them from external load balancers.
	IgnoreExclude bool
	// PublishNodes maintains the node table in Namespace while this agent leads.
	PublishNodes bool
	// Problem is called with the error when the API server refuses a request about the Lease, and with nil once it
	// accepts one. It may be nil.
	Problem func(error)
	// Boundary surrounds the handling of each Service. It may be nil.
	Boundary *lb.Boundary
	Log      *slog.Logger
}

// NewAllocator returns an Allocator that does nothing until Run.
func NewAllocator(o AllocatorOptions) *Allocator { return &Allocator{o: o, pools: o.Pools} }

// Run takes part in the election until ctx ends.
func (a *Allocator) Run(ctx context.Context) error {
	var shutdown func()
	a.events, shutdown = newRecorder(ctx, a.o.Client, a.o.Node)
	defer shutdown()
	for {
		lease := a.awaitLease(ctx)
		if lease == nil {
			return nil
		}
		a.campaign(ctx, lease)
	}
}

// SetPools replaces the pools. Services keep their addresses, and the allocator tries waiting Services again.
func (a *Allocator) SetPools(pools []Pool) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.pools = pools
	if a.again != nil {
		a.again()
	}
}

// class returns the class that names the Lease, the ledger and the field manager.
func (a *Allocator) class() string {
	if len(a.o.Classes) == 0 {
		return ""
	}
	return a.o.Classes[0]
}

// leaseName returns the name of the Lease and of the ledger.
func (a *Allocator) leaseName() string {
	of := a.class()
	if of == "" {
		return leaseName
	}
	// A class may have letters, digits and "-_./", but a name has no upper case, "_" or "/". The hash distinguishes
	// classes that would have the same name.
	sum := sha256.Sum256([]byte(of))
	class := strings.NewReplacer("/", "-", "_", "-").Replace(strings.ToLower(of))
	return fmt.Sprintf("%s-%s-%x", leaseName, class, sum[:3])
}

// lead assigns addresses from the current pools until ctx ends.
func (a *Allocator) lead(ctx context.Context) {
	var publishing sync.WaitGroup
	defer publishing.Wait()
	if a.o.PublishNodes {
		publishing.Go(func() { a.publishNodes(ctx) })
		publishing.Go(func() { a.followAgents(ctx) })
	}
	for delay := time.Duration(0); sleep(ctx, delay); {
		a.mu.Lock()
		term, cancel := context.WithCancel(ctx)
		a.term = newTerm(a, a.pools)
		a.term.assigner.nodes, a.term.excluded = a.nodes, a.excluded
		a.term.assigner.poolNodes = a.poolNodes
		a.again = cancel
		run := a.term.run
		a.mu.Unlock()
		err := run(term)
		changed := term.Err() != nil && ctx.Err() == nil && err == nil
		cancel()
		if delay = leaseRetry; changed {
			delay = 0
		}
		if a.blocked.Store(nil); err != nil && ctx.Err() == nil {
			a.o.Log.Warn("addresses not assigned", "err", err,
				"fix", "apply the manifest again if the API server denies access")
			a.blocked.Store(&err)
		}
		a.report(err)
	}
	a.mu.Lock()
	a.again, a.term = nil, nil
	a.mu.Unlock()
}

// setNodes records how many nodes may and may not have addresses. Services with an address per node may then get more.
func (a *Allocator) setNodes(usable, excluded int) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.nodes == usable && a.excluded == excluded {
		return
	}
	if a.nodes, a.excluded = usable, excluded; a.term != nil {
		a.term.setNodes(usable, excluded)
	}
}
