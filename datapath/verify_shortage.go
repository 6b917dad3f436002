package datapath

import (
	"fmt"
	"time"

	"github.com/vishvananda/netlink"
)

// shortage returns why this process cannot look at the network now, for lack of descriptors or memory: lo is always
// there. What a verification found then would be no fault of the network, so all stays as it was.
func shortage() error {
	if _, err := netlink.LinkByName("lo"); err != nil {
		return fmt.Errorf("look at the network: %w", err)
	}
	return nil
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
