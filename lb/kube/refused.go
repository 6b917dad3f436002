package kube

import (
	"context"
	"errors"
	"net/http"
	"slices"
	"strings"
	"time"

	core "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
)

// This file handles a Service whose status the API server refuses because of an admission policy, or because the object
// is too large for etcd. Other Services still get their addresses.

// reasonRefused is the reason of such a Service's Event and condition.
const reasonRefused = "StatusRefused"

// saidFor is the time after which an Event or condition is repeated. The API server keeps Events for an hour.
const saidFor = 30 * time.Minute

// told is what the owner of a Service was told, and when.
type told struct {
	text string
	at   time.Time
}

// admissionErrors and storageErrors occur in the messages of errors after which nothing is written. The code does not
// matter, because a webhook chooses its own and etcd errors have 500.
var (
	admissionErrors = []string{"denied the request", "failed calling webhook"}
	storageErrors   = []string{"etcdserver: request is too large", "trying to send message larger than max"}
)

func mentions(err error, texts []string) bool {
	return slices.ContainsFunc(texts, func(text string) bool { return strings.Contains(err.Error(), text) })
}

// isOutdated reports whether every write that requires the same version as this one will fail.
func isOutdated(err error) bool {
	return (apierrors.IsConflict(err) || apierrors.IsNotFound(err)) && !apierrors.IsUnexpectedServerError(err) &&
		!mentions(err, admissionErrors)
}

// isRefused reports whether the API server's error means that the write was not and will not be applied. After a
// timeout or another server error it may still be applied.
func isRefused(err error) bool {
	var status apierrors.APIStatus
	if !errors.As(err, &status) || apierrors.IsUnexpectedServerError(err) || isOutdated(err) {
		return false
	}
	if mentions(err, admissionErrors) || mentions(err, storageErrors) {
		return true
	}
	switch code := status.Status().Code; code {
	case http.StatusUnauthorized, http.StatusRequestTimeout, http.StatusTooManyRequests: // not about this Service
		return false
	default:
		return code >= 400 && code < 500
	}
}

// failed handles a failed write of addresses. If the write can no longer be applied, the ledger forgets it; if the API
// server has refused it, the owner of the Service is told.
func (t *term) failed(ctx context.Context, s *core.Service, err error) {
	switch {
	case isOutdated(err):
		t.ledger.done(nameOf(s))
		return
	case !isRefused(err):
		return
	}
	t.ledger.refused(nameOf(s))
	if err := t.ledger.store(ctx); err != nil { // the next request stores it
		t.o.Log.Debug("ledger not written", "err", err)
	}
	d := decision{addrs: statusOf(s), reason: reasonRefused}
	d.warning = note("the API server refuses the addresses: " + err.Error())
	t.mu.Lock()
	last := t.refused[nameOf(s)]
	news := last.text != d.warning || time.Since(last.at) > saidFor
	if news {
		t.refused[nameOf(s)] = told{d.warning, time.Now()}
	}
	t.mu.Unlock()
	if news {
		t.events.Event(s, core.EventTypeWarning, d.reason, d.warning)
	}
	// The message may differ with each refusal, and a changed condition would cause an immediate retry.
	if c := assignedCondition(s); len(d.addrs) > 0 || c != nil && c.Reason == d.reason {
		return
	}
	if err := t.put(ctx, s, hasFinalizer(s), d.addrs, conditionsAfter(s, d)); err != nil {
		t.o.Log.Debug("condition not written", "service", nameOf(s), "err", err)
	}
}

// setFull sets whether Services get no addresses because the ledger is full.
func (t *term) setFull(err error) {
	was := t.blocked.Load()
	switch {
	case err != nil && was == nil:
		t.o.Log.Warn("no addresses for further services", "err", err)
		t.blocked.Store(&err)
	case err == nil && was != nil && errors.Is(*was, errLedgerFull):
		t.blocked.CompareAndSwap(was, nil)
	default:
		return
	}
	t.report(nil)
}
