package healthd

import (
	"errors"
	"log/slog"
	"maps"
	"net"
	"slices"
	"sync"
	"syscall"
	"time"

	"github.com/steelyard-lb/steelyard/lb"
)

// ownError is an error of this node, unrelated to a backend.
type ownError struct{ error }

func (e ownError) Unwrap() error { return e.error }

// inconclusive reports whether a probe failed because this node lacks a resource or permission. The failure then says
// nothing about the backend, which keeps its state.
func inconclusive(err error) bool {
	var own ownError
	var op *net.OpError
	if errors.Is(err, syscall.EACCES) { // on a connection: a prohibit route, or a rejection by another host
		return errors.As(err, &own) || !errors.As(err, &op) || op.Op == "listen"
	}
	return errors.As(err, &own) || slices.ContainsFunc([]syscall.Errno{
		syscall.EMFILE, syscall.ENFILE, // descriptors of the process and of the system
		syscall.ENOBUFS, syscall.ENOMEM, syscall.EAGAIN, syscall.ENOSPC, // memory, processes, epoll watches
		syscall.EADDRNOTAVAIL, syscall.EADDRINUSE, // no local ports, or the source address is gone
		syscall.EPERM, // a local firewall
	}, func(no syscall.Errno) bool { return errors.Is(err, no) })
}

// ownTrouble records checks whose last probe was inconclusive, with the cause.
type ownTrouble struct {
	log    *slog.Logger
	mu     sync.Mutex // guards all below
	causes map[lb.CheckKey]string
	logged time.Time // time of the last warning
}

// logInterval is the minimum time between warnings about inconclusive probes.
const logInterval = time.Minute

func (o *ownTrouble) record(k lb.CheckKey, cause string) {
	o.mu.Lock()
	defer o.mu.Unlock()
	if o.causes == nil {
		o.causes = map[lb.CheckKey]string{}
	}
	o.causes[k] = cause
	if time.Since(o.logged) > logInterval {
		o.logged = time.Now()
		o.log.Warn("health check inconclusive; the backend keeps its state", "service", k.Service,
			"backend", k.BackendName(), "err", cause)
	}
}

func (o *ownTrouble) forget(k lb.CheckKey) {
	o.mu.Lock()
	defer o.mu.Unlock()
	delete(o.causes, k)
}

// Findings returns the causes of currently inconclusive probes, one finding per cause.
func (p *Prober) Findings() (list []lb.Finding) {
	p.own.mu.Lock()
	defer p.own.mu.Unlock()
	count := map[string]int{}
	for _, cause := range p.own.causes {
		count[cause]++
	}
	for _, cause := range slices.Sorted(maps.Keys(count)) {
		list = append(list, lb.FoundChecksInconclusive.About("",
			"%d health checks are inconclusive, and their backends keep their state: %s", count[cause], cause))
	}
	return list
}
