package datapath

import (
	"time"

	"github.com/steelyard-lb/steelyard/datapath/internal/route"
)

// postpone leaves changes for a later round; v.mu is held.
func (v *verifier) postpone(found route.Changes, err error) {
	v.missed.Add(found)
	v.warned.notRun = err.Error()
	v.warned.blind.observe(v.warned.notRun, time.Now())
}

// takePostponed returns the changes that were postponed.
func (v *verifier) takePostponed() route.Changes {
	v.mu.Lock()
	defer v.mu.Unlock()
	missed := v.missed
	v.missed = route.Changes{}
	return missed
}
