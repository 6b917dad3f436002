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
	leader atomic.Value // string: the node that assigns addresses
	// blocked is why this agent assigns nothing although it leads; nil: it does.
	blocked atomic.Pointer[error]
	// stuck are the versions of Services that cannot be handled: they stay as they are until they change.
	stuck sync.Map

	mu    sync.Mutex // guards all below
	pools []Pool
	nodes int // that may have addresses
	// excluded is how many nodes there are that may not, for the text about a cluster in which none may.
	excluded int
	term     *term              // nil: there is none
	again    context.CancelFunc // ends the term, for one with other pools; nil: there is none
}

// Leader returns the node that assigns addresses; "": none, or it is not known yet.
func (a *Allocator) Leader() string {
	name, _ := a.leader.Load().(string)
	return name
}

// AllocatorOptions configures an Allocator.
type AllocatorOptions struct {
	Client kubernetes.Interface
	// Lease is a client for the election whose requests have a timeout of a few seconds, because the last one delays
	// the shutdown while the API server does not answer.
	Lease     kubernetes.Interface
	Node      string // the identity in the election
	Namespace string // of the lease
	Class     string
	Pools     []Pool
	// NoAnnouncer: the nodes announce nothing.
	NoAnnouncer bool
	// IgnoreExclude: they announce although they have the label that excludes them from external load balancers.
	IgnoreExclude bool
	// PublishNodes keeps the node table in Namespace while this agent leads.
	PublishNodes bool
	// Problem is called with the error of a request about the Lease that the API server refuses, and with nil after one
	// that it accepts. Nil: not called.
	Problem func(error)
	// Boundary is around each Service. It may be nil.
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
	for a.awaitLease(ctx) {
		a.campaign(ctx)
	}
	return nil
}

// SetPools replaces the pools. Services keep their addresses, and those that wait for one are tried again.
func (a *Allocator) SetPools(pools []Pool) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.pools = pools
	if a.again != nil {
		a.again()
	}
}

// leaseName returns the name of the Lease, and of the ledger: those of a class have their own leader.
func (a *Allocator) leaseName() string {
	if a.o.Class == "" {
		return leaseName
	}
	// A class has letters, digits and "-_./", but a name no upper case and no "/"; the sum keeps different ones apart.
	sum := sha256.Sum256([]byte(a.o.Class))
	class := strings.NewReplacer("/", "-", "_", "-").Replace(strings.ToLower(a.o.Class))
	return fmt.Sprintf("%s-%s-%x", leaseName, class, sum[:3])
}

// lead assigns addresses until ctx ends, with the pools that are set.
func (a *Allocator) lead(ctx context.Context) {
	var publishing sync.WaitGroup
	defer publishing.Wait()
	if a.o.PublishNodes {
		publishing.Go(func() { a.publishNodes(ctx) })
	}
	for delay := time.Duration(0); sleep(ctx, delay); {
		a.mu.Lock()
		term, cancel := context.WithCancel(ctx)
		a.term = newTerm(a, a.pools)
		a.term.assigner.nodes, a.term.excluded = a.nodes, a.excluded
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
			a.o.Log.Warn("addresses not assigned", "err", err, "fix", "apply the manifest again if it is forbidden")
			a.blocked.Store(&err)
		}
		a.report(err)
	}
	a.mu.Lock()
	a.again, a.term = nil, nil
	a.mu.Unlock()
}

// setNodes records how many nodes may have addresses, and how many may not. Services with an address per node may get
// more.
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
