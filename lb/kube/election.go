package kube

import (
	"context"
	"math/rand/v2"
	"sync"
	"time"

	coordination "k8s.io/api/coordination/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	meta "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/utils/ptr"
)

// An agent watches the Lease, and takes it only when it is free. Candidates in client-go's leaderelection poll it every
// two seconds: 350 requests per second with an agent on each of a thousand nodes. That package also makes each build
// compile informers of all types of Kubernetes.

// The timing of the election. If the leader fails, no address is assigned for up to leaseDuration. The leader renews
// the Lease every leaseRetry, and every agent receives that update. It stops leading renewDeadline after the last
// update that succeeded; until then it tries again every renewRetry.
const (
	leaseDuration = 15 * time.Second
	renewDeadline = 10 * time.Second
	leaseRetry    = 5 * time.Second
	renewRetry    = time.Second
	// forbiddenRetry bounds the delay after the API server has refused a request. The delay starts at leaseRetry,
	// because an API server that is starting refuses everything until it has read the roles.
	forbiddenRetry = time.Minute
	// A free Lease is taken after a random time up to leaseSpread, so that one agent takes it and the others notice.
	leaseSpread = time.Second
)

const leaseName = "steelyard"

// awaitLease waits until the Lease is ours, released or expired, and returns it, or nil when ctx ends. It creates a
// missing Lease, without a holder.
func (a *Allocator) awaitLease(ctx context.Context) *coordination.Lease {
	leases := a.o.Client.CoordinationV1().Leases(a.o.Namespace)
	refused := leaseRetry        // the delay after the next refusal
	var free *coordination.Lease // as last seen
	for ctx.Err() == nil {
		lease, err := leases.Get(ctx, a.leaseName(), meta.GetOptions{})
		if apierrors.IsNotFound(err) {
			missing := &coordination.Lease{ObjectMeta: meta.ObjectMeta{Name: a.leaseName(), Namespace: a.o.Namespace}}
			lease, err = leases.Create(ctx, missing, meta.CreateOptions{})
		}
		a.report(err)
		switch {
		case apierrors.IsAlreadyExists(err): // another agent was first
			sleep(ctx, rand.N(leaseSpread))
		case err != nil:
			delay, fix := leaseRetry, "the API server must respond"
			if apierrors.IsForbidden(err) { // as on every node with the manifest's roles
				delay, refused = refused, min(2*refused, forbiddenRetry)
				fix = "set kubernetes.allocate = false: the manifest's Deployment assigns addresses"
			}
			a.o.Log.Warn("lease not read", "err", err, "fix", fix)
			sleep(ctx, delay)
		case holderOf(lease) == a.o.Node, free != nil && equality.Semantic.DeepEqual(lease.Spec, free.Spec):
			return lease
		default:
			free = a.watchLease(ctx, lease)
			sleep(ctx, rand.N(leaseSpread))
		}
	}
	return nil
}

// watchLease follows another agent's Lease. It returns the Lease once its holder has released it or has not renewed it
// in time, and nil when the watch or ctx has ended. Without a watch, the holder may have renewed it since.
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
		if !sleep(ctx, durationOf(lease)) {
			return nil
		}
		return lease
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
			if !equality.Semantic.DeepEqual(next.Spec, lease.Spec) {
				timer.Reset(durationOf(next))
			}
			lease = next
		}
	}
	return lease
}

func holderOf(l *coordination.Lease) string { return ptr.Deref(l.Spec.HolderIdentity, "") }

func durationOf(l *coordination.Lease) time.Duration {
	return time.Duration(ptr.Deref(l.Spec.LeaseDurationSeconds, int32(leaseDuration/time.Second))) * time.Second
}

// expired reports whether a Lease was not renewed in time. It relies on the holder's clock.
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

// campaign takes a free Lease and leads until another agent takes it, it cannot be renewed, or ctx ends.
func (a *Allocator) campaign(ctx context.Context, lease *coordination.Lease) {
	if holderOf(lease) != a.o.Node {
		lease.Spec.HolderIdentity, lease.Spec.AcquireTime = &a.o.Node, &meta.MicroTime{Time: time.Now()}
		lease.Spec.LeaseTransitions = new(ptr.Deref(lease.Spec.LeaseTransitions, 0) + 1)
	}
	asked := time.Now()
	lease, err := a.writeLease(ctx, lease)
	if err != nil {
		if !apierrors.IsConflict(err) && ctx.Err() == nil { // otherwise another agent was first
			a.o.Log.Warn("lease not taken", "err", err)
			sleep(ctx, leaseRetry)
		}
		return
	}
	a.leader.Store(a.o.Node)
	leading, stop := context.WithCancel(ctx)
	var led sync.WaitGroup
	led.Go(func() { a.lead(leading) })
	lease = a.renewLease(ctx, lease, asked.Add(renewDeadline))
	stop()
	led.Wait()
	a.leader.Store("")
	a.o.Log.Info("this agent does not assign addresses")
	if holderOf(lease) != a.o.Node {
		return
	}
	lease.Spec.HolderIdentity = nil
	release, cancel := context.WithTimeout(context.WithoutCancel(ctx), renewDeadline)
	defer cancel()
	if _, err := a.writeLease(release, lease); err != nil {
		a.o.Log.Warn("lease not released; it expires", "err", err)
	}
}

// renewLease renews the Lease until another agent has it, it was deleted, the deadline has passed since the last
// renewal, or ctx ends. It returns the last version, without a holder if there is no Lease.
func (a *Allocator) renewLease(
	ctx context.Context, lease *coordination.Lease, deadline time.Time,
) *coordination.Lease {
	delay := leaseRetry
	for sleep(ctx, min(delay, time.Until(deadline))) && time.Now().Before(deadline) {
		asked := time.Now()
		attempt, cancel := context.WithDeadline(ctx, deadline)
		next, err := a.writeLease(attempt, lease)
		conflict := apierrors.IsConflict(err)
		if conflict { // perhaps with our own update, whose response was lost
			next, err = a.o.Lease.CoordinationV1().Leases(a.o.Namespace).Get(attempt, a.leaseName(), meta.GetOptions{})
		}
		cancel()
		delay = renewRetry
		switch {
		case apierrors.IsNotFound(err):
			return &coordination.Lease{}
		case err != nil:
			continue
		case holderOf(next) != a.o.Node:
			return next
		case !conflict:
			delay, deadline = leaseRetry, asked.Add(renewDeadline)
		}
		lease = next
	}
	return lease
}

// writeLease writes the Lease with the current time, and returns its new version.
func (a *Allocator) writeLease(ctx context.Context, lease *coordination.Lease) (*coordination.Lease, error) {
	lease = lease.DeepCopy()
	lease.Spec.RenewTime = &meta.MicroTime{Time: time.Now()}
	lease.Spec.LeaseDurationSeconds = new(int32(leaseDuration / time.Second))
	next, err := a.o.Lease.CoordinationV1().Leases(a.o.Namespace).Update(ctx, lease, meta.UpdateOptions{})
	a.report(err)
	return next, err
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
