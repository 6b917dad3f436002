package kube

import (
	"context"
	"math/rand/v2"
	"time"

	coordination "k8s.io/api/coordination/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	meta "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/tools/leaderelection"
	"k8s.io/client-go/tools/leaderelection/resourcelock"
)

// Candidates in client-go's election poll the Lease every two seconds: 350 requests per second with an agent on each of
// a thousand nodes. So an agent watches the Lease and becomes a candidate only when the Lease is free.

// The timing of the election. If the leader fails, no address is assigned for up to leaseDuration. The leader renews
// the Lease every leaseRetry, and every agent receives that update.
const (
	leaseDuration = 15 * time.Second
	renewDeadline = 10 * time.Second
	leaseRetry    = 5 * time.Second
	// forbiddenRetry bounds the delay after the API server has refused a request. The delay starts at leaseRetry,
	// because an API server that is starting refuses everything until it has read the roles.
	forbiddenRetry = time.Minute
	// A free Lease is taken after a random time up to leaseSpread, so that one agent takes it and the others notice.
	leaseSpread = time.Second
)

const leaseName = "steelyard"

// awaitLease returns true when the Lease is missing, released or ours, and false when ctx ends. It takes over an
// expired Lease itself, because client-go would first observe it for its whole duration again.
func (a *Allocator) awaitLease(ctx context.Context) bool {
	leases := a.o.Client.CoordinationV1().Leases(a.o.Namespace)
	refused := leaseRetry // the delay after the next refusal
	for ctx.Err() == nil {
		lease, err := leases.Get(ctx, a.leaseName(), meta.GetOptions{})
		a.report(err)
		switch {
		case apierrors.IsNotFound(err):
			return sleep(ctx, rand.N(leaseSpread))
		case err != nil:
			delay, fix := leaseRetry, "the API server must respond"
			if apierrors.IsForbidden(err) { // as on every node with the manifest's roles
				delay, refused = refused, min(2*refused, forbiddenRetry)
				fix = "set kubernetes.allocate = false: the manifest's Deployment assigns addresses"
			}
			a.o.Log.Warn("lease not read", "err", err, "fix", fix)
			sleep(ctx, delay)
			continue
		case holderOf(lease) == a.o.Node:
			return true
		}
		free := a.watchLease(ctx, lease)
		if !sleep(ctx, rand.N(leaseSpread)) || free == nil {
			continue
		}
		if holderOf(free) == "" {
			return true
		}
		next := free.DeepCopy()
		next.Spec.HolderIdentity, next.Spec.RenewTime = &a.o.Node, &meta.MicroTime{Time: time.Now()}
		next.Spec.AcquireTime = next.Spec.RenewTime
		if _, err := leases.Update(ctx, next, meta.UpdateOptions{}); err == nil { // otherwise another agent was first
			return true
		}
	}
	return false
}

// watchLease follows another agent's Lease. It returns the Lease once its holder has released it or not renewed it in
// time, and nil when the watch or ctx has ended.
func (a *Allocator) watchLease(ctx context.Context, lease *coordination.Lease) *coordination.Lease {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	w, err := a.o.Client.CoordinationV1().Leases(a.o.Namespace).Watch(ctx, meta.ListOptions{
		FieldSelector: fields.OneTermEqualSelector("metadata.name", a.leaseName()).String(),
		// Changes since that version are delivered first.
		ResourceVersion: lease.ResourceVersion,
	})
	if err != nil {
		if ctx.Err() == nil {
			a.o.Log.Warn("lease not watched; reading it instead, every "+leaseDuration.String(), "err", err,
				"fix", `apply the allocator's Role that "steelyard manifest" prints`)
		}
		if sleep(ctx, leaseDuration) && expired(lease) {
			return lease
		}
		return nil
	}
	defer w.Stop()
	timer := time.NewTimer(durationOf(lease))
	defer timer.Stop()
	for holderOf(lease) != "" {
		a.leader.Store(holderOf(lease))
		select {
		case <-ctx.Done():
			return nil
		case <-timer.C: // by our clock: the holder's may differ
			return lease
		case e, open := <-w.ResultChan():
			next, isLease := e.Object.(*coordination.Lease)
			if !open || !isLease || e.Type == watch.Deleted {
				return nil
			}
			lease = next
			timer.Reset(durationOf(lease))
		}
	}
	return lease
}

func holderOf(l *coordination.Lease) string {
	if l.Spec.HolderIdentity == nil {
		return ""
	}
	return *l.Spec.HolderIdentity
}

func durationOf(l *coordination.Lease) time.Duration {
	if l.Spec.LeaseDurationSeconds == nil {
		return leaseDuration
	}
	return time.Duration(*l.Spec.LeaseDurationSeconds) * time.Second
}

// expired reports whether a Lease that cannot be watched was not renewed in time. It relies on the holder's clock.
func expired(l *coordination.Lease) bool {
	return holderOf(l) == "" || l.Spec.RenewTime == nil || time.Since(l.Spec.RenewTime.Time) > durationOf(l)
}

// sleep returns false when ctx ends first.
func sleep(ctx context.Context, d time.Duration) bool {
	select {
	case <-ctx.Done():
		return false
	case <-time.After(d):
		return true
	}
}

// campaign tries to take the Lease and leads while it holds it. It returns when another agent holds it.
func (a *Allocator) campaign(ctx context.Context) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	leaderelection.RunOrDie(ctx, leaderelection.LeaderElectionConfig{
		Lock: reportingLock{&resourcelock.LeaseLock{
			LeaseMeta:  meta.ObjectMeta{Name: a.leaseName(), Namespace: a.o.Namespace},
			Client:     a.o.Lease.CoordinationV1(),
			LockConfig: resourcelock.ResourceLockConfig{Identity: a.o.Node},
		}, a.report},
		LeaseDuration: leaseDuration, RenewDeadline: renewDeadline, RetryPeriod: leaseRetry,
		ReleaseOnCancel: true, Name: leaseName,
		Callbacks: leaderelection.LeaderCallbacks{
			OnStartedLeading: a.lead,
			OnStoppedLeading: func() { a.o.Log.Info("this agent does not assign addresses") },
			OnNewLeader: func(identity string) {
				a.leader.Store(identity)
				if identity != a.o.Node {
					cancel()
				}
			},
		},
	})
}

// report calls Problem, but not for a conflict with another agent or an API server that does not answer.
func (a *Allocator) report(err error) {
	expected := apierrors.IsNotFound(err) || apierrors.IsConflict(err) || apierrors.IsAlreadyExists(err)
	switch {
	case a.o.Problem == nil:
	case err == nil:
		var blocked error
		if p := a.blocked.Load(); p != nil {
			blocked = *p
		}
		a.o.Problem(blocked)
	case !expected && apierrors.ReasonForError(err) != meta.StatusReasonUnknown:
		a.o.Problem(err)
	}
}

// reportingLock reports write errors, which client-go only logs.
type reportingLock struct {
	resourcelock.Interface
	report func(error)
}

func (l reportingLock) Create(ctx context.Context, r resourcelock.LeaderElectionRecord) error {
	err := l.Interface.Create(ctx, r)
	l.report(err)
	return err
}

func (l reportingLock) Update(ctx context.Context, r resourcelock.LeaderElectionRecord) error {
	err := l.Interface.Update(ctx, r)
	l.report(err)
	return err
}
