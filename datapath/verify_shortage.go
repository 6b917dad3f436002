package datapath

import (
	"fmt"
	"time"

	"golang.org/x/sys/unix"
)

// shortage returns why this process cannot look at the network now, for lack of descriptors or memory. What a
// verification found then would be no fault of the network, so all stays as it was.
func shortage() error {
	fd, err := unix.Socket(unix.AF_NETLINK, unix.SOCK_RAW|unix.SOCK_CLOEXEC, unix.NETLINK_ROUTE)
	if err != nil {
		return fmt.Errorf("look at the network: %w", err)
	}
	return unix.Close(fd)
}

// postpone leaves changes to a later round; v.mu is held.
func (v *verifier) postpone(found changes, err error) {
	v.missed.add(found)
	v.warned.notRun = err.Error()
	v.warned.blind.observe(v.warned.notRun, time.Now())
}

// takePostponed returns the changes that were postponed.
func (v *verifier) takePostponed() changes {
	v.mu.Lock()
	defer v.mu.Unlock()
	missed := v.missed
	v.missed = changes{}
	return missed
}
