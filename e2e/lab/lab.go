package lab

import (
	"errors"
	"fmt"
	"os"
	"sync"
)

// Lab is a network of hosts. Its methods may be called from any goroutine.
type Lab struct {
	mu     sync.Mutex // guards the following fields
	hosts  []*Host
	links  int // number created so far
	closed bool
}

// ErrNotRoot is New's error without root.
var ErrNotRoot = errors.New("network namespaces need root; run it with sudo")

// New returns an empty Lab. It fails unless run as root.
func New() (*Lab, error) {
	if os.Geteuid() != 0 {
		return nil, ErrNotRoot
	}
	return &Lab{}, nil
}

// Host adds a host with only a loopback interface. name is only for output: it need not be unique, and the kernel does
// not see it.
func (l *Lab) Host(name string) (*Host, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.closed {
		return nil, fmt.Errorf("host %s: the lab is closed", name)
	}
	h, err := newHost(name)
	if err != nil {
		return nil, fmt.Errorf("host %s: %w", name, err)
	}
	l.hosts = append(l.hosts, h)
	return h, nil
}

// Hosts returns the hosts in the order in which they were added.
func (l *Lab) Hosts() []*Host {
	l.mu.Lock()
	defer l.mu.Unlock()
	return append([]*Host(nil), l.hosts...)
}

// Close ends all processes and servers and removes all hosts. It may be called again.
func (l *Lab) Close() error {
	l.mu.Lock()
	hosts := l.hosts
	l.hosts, l.closed = nil, true
	l.mu.Unlock()
	errs := make([]error, len(hosts))
	var wg sync.WaitGroup
	for i, h := range hosts {
		wg.Go(func() { errs[i] = h.Close() })
	}
	wg.Wait()
	return errors.Join(errs...)
}
